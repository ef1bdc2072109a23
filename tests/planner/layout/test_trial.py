"""Trials: what they count, and when they stop."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ampd.perf.model import ScaledModel
from planner.layout.case import PlanCase
from planner.layout.layout import Layout
from planner.layout.population import population_of
from planner.layout.trial import SHORT, Horizon, Trial, TrialTask
from workloads.trace import Round, Session

from .lab import CASE

SPLIT = Layout(((1, 1),), ((1, 1),))
TASK = TrialTask(SPLIT, 2.0, SHORT, 0, keeps_result=True)


def slower(factor: float) -> PlanCase:
    """The case with engines that take so many times as long."""
    model: Any = ScaledModel(CASE.model, prefill=factor, decode=factor)
    model.profile = CASE.model.profile
    return replace(CASE, model=model)


def test_a_trial_that_is_carried_runs_to_its_end() -> None:
    made = TASK.run(CASE)
    assert made.is_whole
    assert made.carries(0.9)
    assert made.met == made.most == 1.0
    assert made.result is not None
    assert made.result["attainment"]["rounds"] == made.met
    span = SHORT.span(population_of(CASE.sessions, CASE.slo), 2.0)
    assert span.seconds == SHORT.seconds
    assert made.result["rounds"] == pytest.approx(span.rounds, rel=0.2)


def test_the_first_rounds_of_sessions_are_told_from_the_later_ones_of_sessions_in_progress() -> None:
    rounds = (Round(incr_tokens=1000, output_tokens=2), Round(incr_tokens=20, output_tokens=2, tool_s=50.0))
    made = TASK.run(replace(CASE, sessions=(Session(session_id="s", arrival_s=0.0, rounds=rounds),)))
    assert made.result is not None
    assert made.result["ttft_initial_s"]["p50"] > 2 * made.result["ttft_incremental_s"]["p50"]


def test_rounds_that_do_not_end_have_missed_and_leave_their_sessions_behind() -> None:
    stuck = replace(TASK, margin=None).run(slower(1e5))
    assert stuck.is_whole
    assert (stuck.met, stuck.in_time) == (0.0, 0.0)


def test_the_order_of_the_trace_changes_no_trial() -> None:
    rng = random.Random(0)
    sessions = [
        Session(
            session_id=str(number),
            arrival_s=0.0,
            rounds=(
                Round(incr_tokens=10 ** rng.randint(1, 4), output_tokens=rng.randint(1, 200)),
                Round(incr_tokens=20, output_tokens=5, tool_s=1.0),
            ),
        )
        for number in range(300)
    ]
    task = replace(TASK, rate=1.5, margin=None)
    ordered = sorted(sessions, key=lambda session: session.rounds[0].incr_tokens)
    trials = [task.run(replace(CASE, sessions=tuple(each))) for each in (sessions, ordered, ordered[::-1])]
    assert 0 < trials[0].met < 1
    assert trials[0] == trials[1] == trials[2]


def test_refused_rounds_are_no_misses_of_the_ttft_and_count_with_those_that_never_come() -> None:
    rounds = (Round(incr_tokens=60, output_tokens=3), *[Round(incr_tokens=300_000, output_tokens=2)] * 3)
    long = Session(session_id="long", arrival_s=0.0, rounds=rounds)
    made = replace(TASK, margin=None).run(replace(CASE, sessions=(long,)))
    assert made.is_whole
    assert (made.late, made.slow) == (0.0, 0.0)
    assert made.met == pytest.approx(0.25, abs=0.02)
    assert made.met + made.refused == pytest.approx(1.0)
    assert made.result is not None
    assert made.result["attainment"]["rounds"] == made.met


def test_sessions_with_long_tools_fill_the_cluster_in_a_short_trial() -> None:
    # Each session holds 60,000 tokens of KV for half an hour. The replica has room for three of them.
    rounds = (
        Round(incr_tokens=60_000, output_tokens=2),
        *[Round(incr_tokens=20, output_tokens=2, tool_s=300.0)] * 6,
    )
    long = Session(session_id="long", arrival_s=0.0, rounds=rounds)
    case = replace(CASE, sessions=(long,), slo=replace(CASE.slo, ttft_s=2.0))
    # Its last rounds compute the whole context again, because the KV was evicted meanwhile.
    task = TrialTask(Layout((), ((1, 1),)), 0.05, Horizon(30.0, 0.0, 20, 600), 0, margin=None, keeps_result=True)
    made = task.run(case)
    assert made.result is not None
    assert made.result["lost_sessions"] > 50
    assert made.met < 0.5
    alone = replace(task, rate=0.0005).run(case)
    assert alone.met > made.met


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
    assert whole.met <= stopped.most + 0.05, "a trial that stopped says how much it attains at most"
    assert stopped.met <= stopped.most < 1.0


def test_a_rate_beyond_all_measure_needs_no_more_time_or_memory() -> None:
    made = replace(TASK, rate=1e9, margin=None).run(CASE)
    assert made.met < 0.5
    assert made.result is not None
    assert made.result["rounds"] < 20_000


def test_a_trial_stops_when_too_many_sessions_are_overdue() -> None:
    any_share = replace(slower(100.0), attainment=0.0)
    stopped, whole = TASK.run(any_share), replace(TASK, margin=None).run(any_share)
    assert whole.is_whole
    assert whole.in_time < 0.9
    assert not whole.carries(0.0)
    assert not stopped.is_whole
    assert 0 < 1 - stopped.in_time < 1, "those that were too late until then"


def test_trials_are_ranked_by_what_they_miss_most() -> None:
    carried, fewer = Trial(0.95, 0.05, 0.0, 0.99), Trial(0.91, 0.09, 0.0, 1.0)
    rounds_missed, sessions_late = Trial(0.88, 0.12, 0.0, 1.0), Trial(0.92, 0.08, 0.0, 0.9)
    stopped, stopped_early = (Trial(met, 1.0, 0.0, 0.0, is_whole=False) for met in (0.6, 0.3))
    ranking = [carried, fewer, rounds_missed, sessions_late, stopped, stopped_early]
    ranks = [trial.rank(0.9) for trial in ranking]
    assert ranks == sorted(set(ranks))
    assert [trial.carries(0.9) for trial in ranking] == [True, True, False, False, False, False]
