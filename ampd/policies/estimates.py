"""The routes of a round: the times that the performance model predicts for them, and the decision for one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoutingSituation
from ampd.policies.chance import any_of
from ampd.policies.expectations import ITL_SHARE
from ampd.policies.queue_work import mean_rest_s, work_of
from ampd.types import PrefillTask, Route, RouteDecision, RouteEstimate, WorkerView

# Python looks a member of an enumeration up at each use.
_LOCAL: Final = Route.LOCAL
_REMOTE: Final = Route.REMOTE

NO_PREFILL_WORKER = "no-prefill-worker"
"""Reason of a local route where no live prefill worker can take the prompt."""


def local(worker: WorkerView, reason: str, estimates: tuple[RouteEstimate, ...] = ()) -> RouteDecision:
    """The decision to prefill on the session's decode worker."""
    return RouteDecision(_LOCAL, worker.worker_id, reason, estimates)


def towards(worker: WorkerView, decode: WorkerView, reason: str) -> RouteDecision:
    """The decision for a worker that no estimate chose; local if it is the session's decode worker."""
    route = _LOCAL if worker.worker_id == decode.worker_id else _REMOTE
    return RouteDecision(route, worker.worker_id, reason)


def queued_s(worker: WorkerView, model: PerformanceModel) -> float:
    """Prefill time of all tasks at a worker, one after the other."""
    total_s = work_of(worker, model).total_s
    rest = worker.queue_rest
    if rest.tasks:
        total_s += rest.tasks * mean_rest_s(rest, model, worker.parallelism)
    return total_s


def queued_in_passes_s(worker: WorkerView, model: PerformanceModel) -> float:
    """Prefill time of all tasks at a worker. Short ones share passes."""
    work = work_of(worker, model)
    if worker.queue_rest.tasks:
        return work.with_rest_s(worker.queue, worker.queue_rest)
    return work.in_passes_s(worker.queue)


def step_with_s(model: PerformanceModel, worker: WorkerView, context_tokens: int, rounds: int = 1) -> float:
    """A decode step of a worker's batch if `rounds` join it, whose contexts have `context_tokens` in total."""
    return model.decode_step_s(
        worker.decode_batch + rounds, worker.decode_context_tokens + context_tokens, worker.parallelism
    )


def prefill_share(step_s: float, itl_slo_s: float) -> float:
    """Part of a worker's time that its decode steps leave to slices of prefills; below 0: the steps are too slow."""
    return 1.0 - step_s / (ITL_SHARE * itl_slo_s)


def held_at(worker: WorkerView, task: PrefillTask, shared_tokens: Mapping[str, int]) -> int:
    """Tokens of the prompt's beginning that a worker holds, for the task's session or for others."""
    held_tokens = worker.held_tokens.get(task.session_id, 0)
    return max(held_tokens, shared_tokens.get(worker.worker_id, 0)) if shared_tokens else held_tokens


def history_at(situation: RoutingSituation, worker: WorkerView) -> int:
    """Tokens of the prompt that a worker need not compute: the history, or what it holds for other sessions."""
    task = situation.task
    if not situation.shared_tokens:
        return task.hist_tokens
    shared_tokens = situation.shared_tokens.get(worker.worker_id, 0)
    return max(task.hist_tokens, min(shared_tokens, task.context_tokens - 1))


def history_read_s(situation: RoutingSituation, worker: WorkerView) -> float:
    """Time in which a worker reads what it lacks of the history."""
    holder, task = situation.holder or situation.decode, situation.task
    if worker.worker_id == holder.worker_id:
        return 0.0
    missing_tokens = max(task.hist_tokens - held_at(worker, task, situation.shared_tokens), 0)
    if not missing_tokens:
        return 0.0
    return situation.model.kv_transfer_s(missing_tokens, holder.parallelism, worker.parallelism)


def estimate_local(situation: RoutingSituation) -> RouteEstimate:
    """Queue and prefill at the decode worker. Nothing moves, unless the session has just moved."""
    task, decode, model = situation.task, situation.decode, situation.model
    prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, decode.parallelism)
    queue_s = queued_s(decode, model)
    transfer_s = history_read_s(situation, decode)
    total_s = prefill_s + queue_s + transfer_s
    return RouteEstimate(_LOCAL, decode.worker_id, total_s, prefill_s, queue_s, transfer_s)


def estimate_remote(situation: RoutingSituation, worker: WorkerView) -> RouteEstimate:
    """Queue and prefill at a prefill worker. The history that it lacks moves there, and the increment moves back.

    The session's own decode worker, if its role has changed to prefill, is the local route: nothing moves.
    """
    task, decode, model = situation.task, situation.decode, situation.model
    if worker.worker_id == decode.worker_id:
        return estimate_local(situation)
    source, target = decode.parallelism, worker.parallelism
    hist_tokens = history_at(situation, worker)
    prefill_s = model.prefill_s(hist_tokens, task.context_tokens - hist_tokens, target)
    queue_s = queued_s(worker, model)
    transfer_s = model.kv_transfer_s(task.incr_tokens, target, source) + history_read_s(situation, worker)
    total_s = prefill_s + queue_s + transfer_s
    return RouteEstimate(_REMOTE, worker.worker_id, total_s, prefill_s, queue_s, transfer_s)


def least_queued(situation: RoutingSituation, workers: Sequence[WorkerView], reason: str) -> RouteDecision:
    """The decision for the prefill worker with the least queued work, with the estimates of all. Ties are random."""
    estimates = tuple([estimate_remote(situation, worker) for worker in workers])
    best = estimates[index_of_least([estimate.queue_s for estimate in estimates], situation.rng)]
    return RouteDecision(best.route, best.worker_id, reason, estimates)


def index_of_least(values: Sequence[float], rng: random.Random) -> int:
    """Position of the least value. Of equal values it takes a random one, so that equal workers share the load."""
    least = min(values)
    equals = [position for position, value in enumerate(values) if value == least]
    return equals[0] if len(equals) == 1 else any_of(equals, rng)
