"""Whether a session moves to another owner between two rounds, because roles, targets or memory ask for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import ITL_SHARE, held_at, prefill_share, queued_in_passes_s, session_memory, step_with_s
from ampd.types import Moves, PrefillTask, Route, RouteDecision, WorkerView

ROLE, ITL, TTFT, MEMORY = "role", "itl", "ttft", "memory"
REASONS = (ROLE, ITL, TTFT, MEMORY)
"""Why a session moves: its owner no longer owns sessions, its decode batch is too slow, the round would be late on
every route, or its KV memory is full."""

REST_S = 10.0
"""A session that has moved stays for this long, so that it does not move to and fro with the load."""

_ROOM = 0.9
"""Share of a target or of a memory that is planned with at the new owner. What is left over is the hysteresis: an
owner that just misses its target and one that just meets it are equally good."""

_OUTPUT_TOKENS = 100
"""Expected output of a round, because the read of the context before its second token counts in its mean ITL."""

_LEAST_FREE = 0.25
"""Least part of a worker's time that its decode batch leaves to prefills."""

_TRIES = 2
"""New owners for which the route is predicted."""


@dataclass(slots=True, kw_only=True)
class MoveSituation:
    """A round is about to begin at the owner of its session.

    Attributes:
        task: its prefill, with the history that the owner holds.
        owner: the present owner; it may be a prefill worker by now.
        stay: the route of the round if the session stays.
        others: the workers that own sessions, take the round, and can read the owner's KV.
        moved_s: when the session moved last; minus infinity if it has not, as far as is known.
        route: the route of the round if the named worker becomes the owner.
        shared_tokens: worker id -> tokens of the prompt's beginning that the worker holds for other sessions.
        moves: which sessions may move; not "never".
    """

    model: PerformanceModel
    now_s: float
    task: PrefillTask
    owner: WorkerView
    stay: RouteDecision
    others: Sequence[WorkerView]
    moved_s: float
    moves: Moves
    route: Callable[[WorkerView], RouteDecision]
    shared_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Move:
    """A session moves. `decision`: the route of the round under the new owner. `reason`: one of `REASONS`."""

    owner: WorkerView
    decision: RouteDecision
    reason: str


def may_move(moves: Moves, owner: WorkerView, incr_tokens: int) -> bool:
    """Whether a session may leave its owner before a round with this increment. Most sessions may not."""
    if moves == "needed":
        return not owner.role.owns_sessions or _is_full(owner, incr_tokens)
    return moves == "any"


def due_move(situation: MoveSituation) -> Move | None:
    """The move that pays; None: the session stays.

    A move costs the read of the history from the old owner, room in the new owner's memory, and room in its decode
    batch for this session's rounds to come. It pays if there is a reason to leave, and if a new owner is predicted to
    serve the round within both targets, without an eviction. For an owner that no longer owns sessions it is enough
    that the round is not later than at the old owner.

    Raises:
        UserError: the performance model lacks a worker's parallelism.
    """
    if situation.now_s - situation.moved_s < REST_S or not situation.others:
        return None
    reason = _reason(situation)
    if reason is None:
        return None
    for worker in _best(situation):
        decision = situation.route(worker)
        if _serves(situation, worker, decision, reason):
            return Move(worker, decision, reason)
    return None


def drops_history(before: str, owner: str, prefill: str) -> bool:
    """Whether the owner before drops a session's KV at the end of the first complete round at the new owner.

    It keeps the KV as the worker that has prefilled this round, because it may prefill the next ones too. If the round
    did not complete, nobody is known to have the whole context, so it keeps the KV as well.

    Args:
        before, owner, prefill: ids of the owner before, of the present one, and of the worker of the round's prefill.
    """
    return before not in (owner, prefill)


def _reason(situation: MoveSituation) -> str | None:
    """Why the session should leave its owner; None: it should not."""
    owner, task = situation.owner, situation.task
    if not owner.role.owns_sessions:
        return ROLE
    if situation.moves == "any":
        if _step_share(situation, owner) > ITL_SHARE:
            return ITL
        if _ttft_s(situation, owner, situation.stay) > _left_s(situation):
            return TTFT
    if _is_full(owner, task.incr_tokens) and _eviction_costs_more(situation):
        return MEMORY
    return None


def _is_full(owner: WorkerView, incr_tokens: int) -> bool:
    """Whether the owner must evict something to keep this many tokens more."""
    used_tokens, capacity_tokens = session_memory(owner)
    return capacity_tokens > 0 and used_tokens + incr_tokens > capacity_tokens


def _eviction_costs_more(situation: MoveSituation) -> bool:
    """Whether computing such a history again takes longer than reading it. The owner would evict one like it."""
    task, model, owner = situation.task, situation.model, situation.owner.parallelism
    if not task.hist_tokens:
        return True
    target = situation.others[0].parallelism
    return model.kv_transfer_s(task.hist_tokens, owner, target) < model.prefill_s(0, task.hist_tokens, target)


def _best(situation: MoveSituation) -> Iterator[WorkerView]:
    """The workers with the most room in memory and time for the session, the best first."""
    loads = [_load(situation, worker) for worker in situation.others]
    for _ in range(min(_TRIES, len(loads))):
        best = min(range(len(loads)), key=loads.__getitem__)
        if loads[best] == math.inf:
            return
        loads[best] = math.inf
        yield situation.others[best]


def _load(situation: MoveSituation, worker: WorkerView) -> float:
    """The shares of its targets and of its memory that a worker uses with the session; infinite: too much.

    A session needs room to grow in the memory, so that no other one is evicted for it.
    """
    memory, (used_tokens, capacity_tokens) = 0.0, session_memory(worker)
    if capacity_tokens:
        new_tokens = situation.task.context_tokens - held_at(worker, situation.task, situation.shared_tokens)
        if used_tokens + new_tokens > _ROOM * capacity_tokens:
            return math.inf
        memory = (used_tokens + new_tokens) / capacity_tokens
    step_share = _step_share(situation, worker)
    if step_share > _ROOM * ITL_SHARE:
        return math.inf
    return step_share + memory + queued_in_passes_s(worker, situation.model) / situation.task.slo.ttft_s


def _serves(situation: MoveSituation, worker: WorkerView, decision: RouteDecision, reason: str) -> bool:
    """Whether the new owner is predicted to serve the round as it should."""
    task, model = situation.task, situation.model
    if decision.route is Route.REMOTE:
        # It reads the whole context behind the first token. That time is between the round's tokens.
        context_tokens = task.context_tokens - held_at(worker, situation.task, situation.shared_tokens)
        read_s = model.kv_transfer_s(context_tokens, situation.owner.parallelism, worker.parallelism)
        if _step_share(situation, worker) + read_s / _OUTPUT_TOKENS / task.slo.itl_s > ITL_SHARE:
            return False
    moved_s = _ttft_s(situation, worker, decision)
    if moved_s <= _ROOM * _left_s(situation):
        return True
    return reason == ROLE and moved_s <= _ttft_s(situation, situation.owner, situation.stay)


def _step_share(situation: MoveSituation, worker: WorkerView) -> float:
    """A decode step with the round in the batch, as a share of the ITL target."""
    return step_with_s(situation.model, worker, situation.task.context_tokens) / situation.task.slo.itl_s


def _left_s(situation: MoveSituation) -> float:
    task = situation.task
    return task.slo.ttft_s - (situation.now_s - task.arrival_s)


def _ttft_s(situation: MoveSituation, owner: WorkerView, decision: RouteDecision) -> float:
    """The predicted time of a route under an owner. A remote route that its policy predicts no time for takes none."""
    for estimate in decision.estimates:
        if estimate.worker_id == decision.worker_id:
            return estimate.total_s
    return _local_s(situation, owner) if decision.route is Route.LOCAL else 0.0


def _local_s(situation: MoveSituation, worker: WorkerView) -> float:
    """Read, queue and prefill at a worker in the time that its decode batch leaves."""
    task, model, old = situation.task, situation.model, situation.owner
    missing_tokens = 0
    if worker.worker_id != old.worker_id:
        missing_tokens = max(task.hist_tokens - held_at(worker, situation.task, situation.shared_tokens), 0)
    read_s = model.kv_transfer_s(missing_tokens, old.parallelism, worker.parallelism) if missing_tokens else 0.0
    busy_s = queued_in_passes_s(worker, model) + model.prefill_s(task.hist_tokens, task.incr_tokens, worker.parallelism)
    step_s = step_with_s(model, worker, task.context_tokens)
    free = prefill_share(step_s, task.slo.itl_s) if worker.decode_batch else 1.0
    return read_s + busy_s / max(free, _LEAST_FREE)
