"""Prefills and decode steps in one pass."""

from dataclasses import dataclass, replace

import pytest

from ampd.policies.base import Compute, SlicingSituation
from ampd.policies.passes import mixed_pass_s
from ampd.types import Parallelism
from planner.simulator.options import Policies, SimulationOptions

from .lab import LOCAL, MODEL, run, session, single

TP1 = Parallelism(1)


@dataclass
class Cut:
    """Slices of `tokens`."""

    tokens: int
    mixes: bool
    is_whole: bool = False
    shares_passes: bool = False

    def slice(self, situation: SlicingSituation) -> Compute:
        return Compute(min(self.tokens, situation.task.incr_tokens), self.mixes)

    def turn(self, situation: SlicingSituation) -> int:
        return situation.task.incr_tokens


def cut(tokens: int, mixes: bool) -> Policies:
    return replace(LOCAL, slicing=Cut(tokens, mixes))


TALK_AND_PROMPT = [session("talks", (160, 200)), session("reads", (4096, 2), arrival_s=0.3)]


def longest_gap_s(policies: Policies) -> float:
    return max(gap.first_s for gap in run(TALK_AND_PROMPT, single(prefill=0), policies).gaps)


def test_a_slice_and_a_step_take_the_time_of_one_pass() -> None:
    pass_s = mixed_pass_s(MODEL, [(4096 - 512, 512)], 1, 250, TP1)
    assert longest_gap_s(cut(512, True)) == pytest.approx(pass_s, rel=0.01)
    pause_s = MODEL.prefill_s(4096 - 512, 512, TP1) + MODEL.decode_step_s(1, 250, TP1)
    assert longest_gap_s(cut(512, False)) == pytest.approx(pause_s, rel=0.01)


def test_the_steps_of_a_batch_are_in_the_passes_of_a_policy_that_shares_them() -> None:
    policies = replace(LOCAL, slicing=Cut(512, False, shares_passes=True))
    pass_s = mixed_pass_s(MODEL, [(4096 - 512, 512)], 1, 250, TP1)
    assert longest_gap_s(policies) == pytest.approx(pass_s, rel=0.01)


@pytest.mark.parametrize("shares_passes", [False, True])
def test_slices_that_share_a_pass_with_a_step_follow_each_other(shares_passes: bool) -> None:
    policies = replace(LOCAL, slicing=Cut(512, not shares_passes, shares_passes=shares_passes))
    done = run(TALK_AND_PROMPT, single(prefill=0), policies, SimulationOptions(keeps_timeline=True))
    ends = [span.end_s for span in done.timeline if span.detail.get("session") == "reads" and span.kind == "prefill"]
    begins = [
        span.start_s for span in done.timeline if span.detail.get("session") == "reads" and span.kind == "prefill"
    ]
    assert len(ends) == 8
    assert begins[1:] == ends[:-1], "no step of the batch alone in between"
