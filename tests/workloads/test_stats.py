"""Statistics of a trace against sums over its rounds."""

from __future__ import annotations

from hypothesis import given, settings

from tests.planner.simulator.lab import session_lists
from workloads.stats import describe, format_stats, trace_stats
from workloads.trace import Session


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
