"""What a trial counts: rounds within and past their targets, sessions in time, and when a trial has seen enough."""

from __future__ import annotations

from math import inf

import pytest

from ampd.types import Slo
from planner.layout.layout import Served
from planner.layout.trial import Counts, Limits, RoundCounts, Span, TimeOverError, TooManyMissedError
from planner.simulator.outcome import SimulatedRound
from workloads.trace import Round, Session

SLO = Slo(1.0, 0.1)
SPAN = Span(10.0, 90.0, sessions=10, rounds=20)


def ended(
    name: str,
    index: int = 0,
    sent_s: float = 20.0,
    *,
    ttft_s: float = 0.5,
    itl_s: float = 0.05,
    error: str | None = None,
) -> SimulatedRound:
    return SimulatedRound(name, index, sent_s, 0, 10, 11, ttft_s, itl_s, ttft_s + 10 * itl_s, error)


def served(name: str, rounds: int = 2, arrival_s: float = 0.0) -> Served:
    item = Round(incr_tokens=10, output_tokens=11, tool_s=19.0)
    session = Session(
        session_id=name, arrival_s=arrival_s, rounds=(item.model_copy(update={"tool_s": 0.0}), *[item] * (rounds - 1))
    )
    return Served(session, (2.0,) * rounds, 2.0 * rounds)


def counts_of(*names: str, limits: Limits | None = None, over_s: float = inf, arrival_s: float = 0.0) -> Counts:
    sessions = {name: served(name, arrival_s=arrival_s) for name in names}
    return Counts(sessions, SLO, SPAN, limits, over_s)


def test_rounds_count_by_the_targets_that_they_missed() -> None:
    counts = RoundCounts()
    counts.add(ended("met"), SLO, 0)
    counts.add(ended("late", ttft_s=2.0), SLO, 0)
    counts.add(ended("slow", itl_s=0.2), SLO, 1)
    counts.add(ended("both", ttft_s=2.0, itl_s=0.2), SLO, 0)
    assert (counts.met, counts.missed, counts.late, counts.slow, counts.refused) == (1, 3, 2, 2, 0)
    assert counts.due == {"met": 1, "late": 1, "both": 1}, "the session of the slow round goes on"


def test_a_refused_round_counts_with_the_rounds_that_never_come() -> None:
    counts = RoundCounts()
    counts.add(ended("s"), SLO, 3)
    counts.add(ended("s", 1, error="no room"), SLO, 2)
    assert (counts.met, counts.missed, counts.refused, counts.due) == (1, 3, 3, {"s": 4})


def test_an_unfinished_round_counts_as_the_more_frequent_miss() -> None:
    counts = RoundCounts()
    counts.add(ended("slow", itl_s=0.2), SLO, 0)
    counts.add_unfinished(["a", "b"])
    assert (counts.missed, counts.slow, counts.late, counts.due) == (3, 3, 0, {"slow": 1, "a": 1, "b": 1})


def test_rounds_before_the_span_do_not_count() -> None:
    counts = counts_of("s")
    counts(ended("s", sent_s=0.0))
    assert counts.rounds.records == []
    counts(ended("s", 1))
    assert (counts.rounds.met, counts.close()) == (1, 1.0)


def test_a_session_that_falls_far_behind_is_overdue() -> None:
    counts = counts_of("fine", "behind", arrival_s=20.0)
    counts(ended("fine", 1))
    counts(ended("behind", 1, ttft_s=9.0))
    assert counts.close() == 0.5


def test_a_round_that_was_sent_back_counts_from_its_first_attempt() -> None:
    counts = counts_of("s")
    sent_back = ended("s")
    counts(sent_back)
    assert (sent_back.sent_s, sent_back.ttft_s, sent_back.e2e_s) == pytest.approx((0.0, 20.5, 21.0))
    assert (counts.rounds.met, counts.rounds.late, counts.close()) == (0, 1, 0.0)


def test_a_round_under_way_past_its_targets_counts_at_the_end() -> None:
    counts = counts_of("s")
    assert counts.close() == 0.0
    assert (counts.rounds.missed, counts.rounds.due) == (1, {"s": 1})


def test_a_trial_ends_when_too_many_rounds_missed_or_its_time_is_over() -> None:
    counts = counts_of("a", "b", limits=Limits(missed=0.05, overdue=inf))
    counts(ended("a", 1, ttft_s=2.0))
    with pytest.raises(TooManyMissedError):
        counts(ended("b", 1, ttft_s=2.0))
    with pytest.raises(TimeOverError):
        counts_of("a", over_s=-inf)(ended("a", 1))
