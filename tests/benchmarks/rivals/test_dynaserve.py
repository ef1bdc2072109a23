"""DynaServe: passes keep the ITL target."""

import pytest

from ampd.policies.base import Compute
from ampd.policies.passes import mixed_pass_s
from ampd.policies.registry import create
from ampd.types import Parallelism, RunningRound
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, round_of

# `PLAIN`: 10 ms a pass and 1 ms a token; a step of n sequences takes 5 + n ms.
TP = Parallelism()
PASSES = create("slicing", "dynaserve")


def test_a_pass_has_the_tokens_that_keep_the_target_with_the_step() -> None:
    batch = [RunningRound(5, 0.1, 0.04, 1000)] * 5
    assert situations.slice(PASSES, round_of(100, 400), batch, TP, PLAIN, 0.0) == Compute(25, mixes=True)
    assert mixed_pass_s(PLAIN, [(100, 25)], 5, 5000, TP) == pytest.approx(0.04)
    assert situations.slice(PASSES, round_of(100, 20), batch, TP, PLAIN, 0.0) == Compute(20, mixes=True)
    assert situations.slice(PASSES, round_of(100, 400), batch * 9, TP, PLAIN, 0.0) == Compute(16, mixes=True)
    assert situations.slice(PASSES, round_of(100, 400), [], TP, PLAIN, 0.0) == Compute(400)
