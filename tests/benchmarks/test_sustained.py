"""Sessions in time: tools and tokens count, a session that starves does not, and some rounds are out of reach."""

from __future__ import annotations

import pytest

from ampd.perf.presets import analytic_model
from ampd.types import Parallelism, Slo
from benchmarks.sustained import in_time_share, out_of_reach, time_at_targets_s
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


def test_a_round_is_out_of_reach_if_no_idle_worker_serves_it_on_target() -> None:
    model, small, large = analytic_model("llama-3.1-8b", "h100"), Parallelism(1), Parallelism(4)
    rounds = (Round(incr_tokens=8000, output_tokens=2), Round(incr_tokens=50, output_tokens=2))
    session = Session(session_id="s", arrival_s=0.0, rounds=rounds)
    slow_s, fast_s = (model.prefill_s(0, 8000, each) for each in (small, large))
    step_s = model.decode_step_s(1, 8001, small)
    assert fast_s < slow_s
    between = Slo((slow_s + fast_s) / 2, 2 * step_s)
    assert out_of_reach(session, model, [small], between) == {0}, "the second round has its history"
    assert not out_of_reach(session, model, [small, large], between)
    assert out_of_reach(session, model, [small], Slo(2 * slow_s, step_s / 2)) == {0, 1}
    assert not out_of_reach(session, model, [small], Slo(slow_s, 2 * step_s))
