"""Statistics of a trace against sums over its rounds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from hypothesis import given, settings

from tests.planner.simulator.lab import session_lists
from workloads.trace import Round, Session
from workloads.trace_command import describe, format_stats, trace_stats


@settings(max_examples=20)
@given(session_lists())
def test_counts_are_those_of_the_rounds(sessions: list[Session]) -> None:
    stats = trace_stats(sessions)
    rounds = [item for session in sessions for item in session.rounds]
    assert (stats["sessions"], stats["rounds"]) == (len(sessions), len(rounds))
    assert stats["incr_tokens_total"] == sum(item.incr_tokens for item in rounds)
    assert stats["max_context_tokens"]["max"] == max(session.max_context_tokens for session in sessions)
    assert stats["rewrites"] <= sum(item.keep_tokens is not None for item in rounds)
    assert (stats["tool_s"] is None) == all(len(session.rounds) == 1 for session in sessions)
    assert len(format_stats(stats).splitlines()) == 4 + sum(isinstance(value, dict) for value in stats.values())


def test_a_distribution_is_described_by_its_order() -> None:
    assert describe([]) is None
    assert describe([3.0, 1.0, 2.0]) == {"mean": 2.0, "min": 1.0, "p50": 2.0, "p95": 2.9, "p99": 2.98, "max": 3.0}


def test_sessions_are_not_kept() -> None:
    """Of a round with its words, only numbers stay."""

    def sessions() -> Iterator[Session]:
        for number in range(50):
            rounds = tuple(Round(incr_tokens=9, output_tokens=9, text=f"{number} {index}" * 500) for index in range(20))
            yield Session(session_id=str(number), arrival_s=number, rounds=rounds)

    trace_stats(sessions())
    tracemalloc.start()
    try:
        trace_stats(sessions())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 400_000  # the words alone are 2,000,000
