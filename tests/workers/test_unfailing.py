"""A slicing policy that raises stops no prefill: it is computed whole, and told once."""

import pytest

from ampd.policies.base import SlicingSituation
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.serving.fixed_slices import FixedSlices
from tests.workers.engines.modelled_lab import Times
from workers.unfailing import UnfailingSlicing

SITUATION = SlicingSituation(
    model=Times(),
    now_s=1.0,
    task=PrefillTask("t", "s", 10, 500, 0.0, Slo(1.0, 0.1)),
    running=(),
    parallelism=Parallelism(),
)


class Failing(FixedSlices):
    """Raises as long as it is told to."""

    fails = True

    def slice(self, situation: SlicingSituation) -> int:
        if self.fails:
            raise ValueError("no size")
        return super().slice(situation)


def test_a_slicing_policy_that_raises_computes_the_prefill_whole(caplog: pytest.LogCaptureFixture) -> None:
    policy = Failing(64)
    unfailing = UnfailingSlicing(policy)
    assert unfailing.slice(SITUATION) == 500
    assert len(caplog.records) == 1, "one line for failures in a row"
    policy.fails = False
    assert unfailing.slice(SITUATION) == 64
    policy.fails = True
    assert unfailing.slice(SITUATION) == 500
    assert [record.getMessage() for record in caplog.records] == [
        "the slicing policy failed, prefills are computed whole: ValueError('no size')"
    ] * 2
