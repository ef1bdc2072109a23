"""The attainment that was recorded under the present roles. Other roles must beat it."""

from __future__ import annotations

from collections.abc import Iterator

from ampd.policies.base import PoolsSituation


def attained(situation: PoolsSituation, since_s: float, least_rounds: int = 1) -> float | None:
    """The mean of two shares: of the rounds, and of the sessions whose rounds all met their targets.

    Rounds that ended since then count, and rounds in progress that have certainly missed a target. A long output is no
    miss. So a round that decodes counts as missed only if it lasts longer than any round that ended.

    Args:
        least_rounds: with fewer rounds nothing is known, and the answer is None.
    """
    sessions: dict[str, bool] = {}
    met = rounds = 0
    for name, is_met in _outcomes(situation, since_s):
        met, rounds = met + is_met, rounds + 1
        sessions[name] = is_met and sessions.get(name, True)
    if rounds < max(least_rounds, 1):
        return None
    return (met / rounds + sum(sessions.values()) / len(sessions)) / 2


def _outcomes(situation: PoolsSituation, since_s: float) -> Iterator[tuple[str, bool]]:
    """(session, whether the targets were met) of each round whose outcome is known."""
    now_s, ttft_s = situation.now_s, situation.slo.ttft_s
    queued = {task.session_id for view in situation.workers for task in view.queue}
    ended = [item for items in situation.load.values() for item in items if item.ended_s is not None]
    longest_s = max((item.ended_s - item.sent_s for item in ended if item.ended_s is not None), default=0.0)
    for name, items in situation.load.items():
        for item in items:
            if item.ended_s is not None:
                if item.ended_s >= since_s:
                    yield name, bool(item.is_met)
            elif now_s - item.sent_s > ttft_s + (0.0 if name in queued else longest_s):
                yield name, False
