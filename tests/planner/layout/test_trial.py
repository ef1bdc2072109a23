"""Trials: what they count, when they stop, and what changes under other circumstances."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.layout.layout import Layout
from planner.layout.trial import AS_PLANNED, SHORT, TrialTask, Variation, _longer
from workloads.trace import Round, Session

from .lab import CASE

SPLIT = Layout(((1, 1),), ((1, 1),))
TASK = TrialTask(SPLIT, 2.0, SHORT, 0, keeps_result=True)


def test_a_trial_that_is_carried_runs_to_its_end() -> None:
    made = TASK.run(CASE)
    assert made.is_whole
    assert made.carries(0.9)
    assert made.met == 1.0
    assert made.result is not None
    assert made.result["attainment"]["rounds"] == made.met
    assert made.result["rounds"] == 2 * SHORT.sessions(CASE, 2.0) > 2 * SHORT.least_sessions


def test_refused_rounds_are_no_misses_of_the_ttft_and_count_with_those_that_never_come() -> None:
    rounds = (Round(incr_tokens=60, output_tokens=3), *[Round(incr_tokens=300_000, output_tokens=2)] * 3)
    long = Session(session_id="long", arrival_s=0.0, rounds=rounds)
    made = replace(TASK, margin=None).run(replace(CASE, sessions=(long,)))
    assert made.is_whole
    assert (made.met, made.late, made.slow, made.refused) == (0.25, 0.0, 0.0, 0.75)


@pytest.mark.slow
def test_a_rate_that_is_far_too_high_stops_early() -> None:
    much = replace(TASK, rate=400.0)
    stopped, whole = much.run(CASE), replace(much, margin=None).run(CASE)
    assert not stopped.is_whole
    assert stopped.result is None
    assert not stopped.carries(0.0)
    assert whole.is_whole
    assert whole.met < 0.9
    assert whole.late > 0.1


@pytest.mark.parametrize("variation", [Variation(rate=150.0), Variation(seconds=100.0), Variation(tokens=300.0)])
def test_other_circumstances_lower_the_attainment(variation: Variation) -> None:
    base = replace(TASK, margin=None, keeps_result=False)
    assert base.run(CASE).met == 1.0
    assert replace(base, variation=variation).run(CASE).met < 0.9
    assert Variation() == AS_PLANNED


def test_longer_prompts_keep_the_part_of_the_context_that_is_kept() -> None:
    rounds = (
        Round(incr_tokens=100, output_tokens=10),
        Round(incr_tokens=40, output_tokens=10, keep_tokens=50),
        Round(incr_tokens=20, output_tokens=5),
    )
    session = Session(session_id="s", arrival_s=0.0, rounds=rounds)
    (longer,) = _longer([session], 1.5)
    assert [item.incr_tokens for item in longer.rounds] == [150, 60, 30]
    assert longer.rounds[1].keep_tokens == 75
    assert Session.model_validate(longer.model_dump()) == longer


def test_a_trial_stops_when_too_many_sessions_are_overdue() -> None:
    any_share = replace(CASE, attainment=0.0)
    slow = replace(TASK, variation=Variation(seconds=100.0))
    stopped, whole = slow.run(any_share), replace(slow, margin=None).run(any_share)
    assert whole.is_whole
    assert whole.in_time < 0.9
    assert not whole.carries(0.0)
    assert not stopped.is_whole
