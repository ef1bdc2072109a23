"""What counts: rounds that some worker could serve on target, and loads under which nearly all sessions end in time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ampd.perf.model import PerformanceModel
from ampd.types import Parallelism, Slo
from planner.layout.trial import TIME_FACTOR
from planner.simulator.outcome import SimulatedRound
from workloads.trace import Session


def in_time_share(rounds: Sequence[SimulatedRound], sessions: Sequence[Session], slo: Slo) -> float:
    """The share of the sessions that ended within `TIME_FACTOR` times their time at the targets."""
    ends: dict[str, float] = {}
    for record in rounds:
        ends[record.session_id] = max(ends.get(record.session_id, 0.0), record.ended_s)
    in_time = sum(ends[session.session_id] - session.arrival_s <= longest_s(session, slo) for session in sessions)
    return in_time / len(sessions)


def longest_s(session: Session, slo: Slo) -> float:
    """The longest time from the arrival to the end of a session that ends in time."""
    return TIME_FACTOR * time_at_targets_s(session, slo)


def time_at_targets_s(session: Session, slo: Slo) -> float:
    """Seconds of a session whose rounds all take exactly their targets, tools included."""
    return sum(item.tool_s + slo.ttft_s + slo.itl_s * (item.output_tokens - 1) for item in session.rounds)


def out_of_reach(
    session: Session, model: PerformanceModel, parallelisms: Collection[Parallelism], slo: Slo
) -> frozenset[int]:
    """The rounds, by index, that no idle worker with all of their history can serve on target."""

    def is_on_target(hist: int, incr: int, output: int, parallelism: Parallelism) -> bool:
        step_s = model.decode_step_s(1, hist + incr + output // 2, parallelism)
        return model.prefill_s(hist, incr, parallelism) <= slo.ttft_s and step_s <= slo.itl_s

    return frozenset(
        index
        for index, ((hist, incr), round_) in enumerate(zip(session.computed_tokens(), session.rounds, strict=True))
        if not any(is_on_target(hist, incr, round_.output_tokens, each) for each in parallelisms)
    )
