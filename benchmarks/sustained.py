"""Whether a load is sustained: nearly all sessions end in time, so that starving some of them serves no others."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.types import Slo
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
