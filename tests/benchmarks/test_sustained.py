"""Sessions in time: tools and tokens count, and a session that starves does not."""

from __future__ import annotations

import pytest

from ampd.types import Slo
from benchmarks.sustained import in_time_share, time_at_targets_s
from planner.layout.trial import TIME_FACTOR
from planner.simulator.outcome import SimulatedRound
from workloads.trace import Round, Session

SLO = Slo(0.5, 0.1)


def test_time_at_targets_counts_tools_and_tokens() -> None:
    rounds = (Round(incr_tokens=5, output_tokens=11), Round(incr_tokens=5, output_tokens=1, tool_s=3.0))
    session = Session(session_id="s", arrival_s=9.0, rounds=rounds)
    assert time_at_targets_s(session, Slo(0.5, 0.1)) == pytest.approx(0.5 + 1.0 + 3.0 + 0.5)


def test_a_session_that_ends_late_is_not_in_time() -> None:
    sessions = [
        Session(session_id=name, arrival_s=2.0, rounds=(Round(incr_tokens=5, output_tokens=6),)) for name in "ab"
    ]
    limit_s = TIME_FACTOR * 1.0

    def ended(name: str, e2e_s: float) -> SimulatedRound:
        return SimulatedRound(name, 0, 2.0, 0, 5, 6, e2e_s=e2e_s)

    assert in_time_share([ended("a", limit_s), ended("b", limit_s)], sessions, SLO) == 1.0
    assert in_time_share([ended("a", limit_s), ended("b", limit_s + 0.1)], sessions, SLO) == 0.5
