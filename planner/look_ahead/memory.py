"""The KV memory that sessions need, now and soon. A replay of minutes does not show that this memory fills up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampd.policies.base import PoolsSituation
from ampd.policies.capacity import session_memory
from ampd.recent_load import Load, RecentRound, all_rounds
from ampd.types import WorkerView

_GROWTH_S = 150.0
"""Growth is expected for this time."""
_LEAST_S = 30.0
"""Growth is measured over the later half of the record, because a cluster that has just started fills up until the
first sessions end. Of a shorter time no growth is told."""


def sessions_share(owners: Sequence[WorkerView], after: Sequence[WorkerView]) -> float:
    """KV of the sessions on `owners`, as a share of the memory of the later owners; 0: unlimited memory.

    A session counts once. A worker that was a prefill worker still has copies of sessions, which are evicted before
    other KV.
    """
    capacity_tokens = sum(session_memory(view)[1] for view in after)
    return sum(_held(owners).values()) / capacity_tokens if capacity_tokens else 0.0


def will_be_short(situation: PoolsSituation, owners: Sequence[WorkerView], most: float) -> bool:
    """Whether the KV of sessions, if it grows on at the present rate, soon takes more than `most` of the memory.

    Sessions whose rounds are late in a queue do not count. They are here for so long because prefills wait. Fewer
    prefill workers would make them stay longer.
    """
    capacity_tokens = sum(session_memory(view)[1] for view in owners)
    measured_s = _measured_s(situation)
    if not capacity_tokens or measured_s < _LEAST_S:
        return False
    late = _late_in_queues(situation)
    held = {name: tokens for name, tokens in _held(owners).items() if name not in late}
    load = {name: rounds for name, rounds in situation.load.items() if name not in late}
    growth_tokens = _growth_tokens(held, load, situation.now_s, measured_s)
    return sum(held.values()) + growth_tokens > most * capacity_tokens


def _measured_s(situation: PoolsSituation) -> float:
    """For how long growth is measured."""
    first_s = min((item.sent_s for item in all_rounds(situation.load)), default=situation.now_s)
    return min((situation.now_s - first_s) / 2, _GROWTH_S)


def _late_in_queues(situation: PoolsSituation) -> set[str]:
    """Sessions whose round waits for its prefill for longer than its TTFT target."""
    tasks = [task for view in situation.workers for task in view.queue]
    return {task.session_id for task in tasks if situation.now_s - task.arrival_s > task.slo.ttft_s}


def _growth_tokens(held: Mapping[str, int], load: Load, now_s: float, measured_s: float) -> float:
    """How much the KV of sessions grows in the next `_GROWTH_S`, if it grows on at the rate that was measured.

    Args:
        held: session -> the tokens that its owner holds now.
        load: the rounds of the sessions.
    """
    since_s = now_s - measured_s
    now_tokens = sum(held.get(name, 0) for name in load)
    then_tokens = sum(
        _context_tokens(rounds, since_s)
        for name, rounds in load.items()
        if name in held or (rounds[-1].ended_s or now_s) > since_s
    )
    return (now_tokens - then_tokens) * _GROWTH_S / measured_s


def _held(owners: Sequence[WorkerView]) -> dict[str, int]:
    """Session -> the tokens that the owner with the most of them holds."""
    held: dict[str, int] = {}
    for view in owners:
        for name, tokens in view.held_tokens.items():
            held[name] = max(held.get(name, 0), tokens)
    return held


def _context_tokens(rounds: Sequence[RecentRound], at_s: float) -> int:
    """The context of a session at a time, as far as the recent load tells."""
    ended = [item for item in rounds if item.ended_s is not None and item.ended_s <= at_s]
    if ended:
        return ended[-1].prompt_tokens + (ended[-1].output_tokens or 0)
    return rounds[0].kept_tokens
