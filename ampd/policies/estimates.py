"""What a round's prefill would cost on each route, by the performance model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.types import PrefillTask, Route, RouteDecision, RouteEstimate, WorkerView

NO_PREFILL_WORKER = "no-prefill-worker"
"""Reason of a local route where no live prefill worker can take the prompt."""


def able(task: PrefillTask, prefill: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """The workers whose longest context takes the prompt (0: unknown, counts as able)."""
    needed = task.context_tokens
    return [worker for worker in prefill if not 0 < worker.max_context_tokens < needed]


def local(worker: WorkerView, reason: str, estimates: tuple[RouteEstimate, ...] = ()) -> RouteDecision:
    """The decision to prefill on the session's decode worker."""
    return RouteDecision(Route.LOCAL, worker.worker_id, reason, estimates)


def towards(worker: WorkerView, decode: WorkerView, reason: str) -> RouteDecision:
    """The decision for a worker that was not chosen by an estimate; local if it is the session's decode worker."""
    route = Route.LOCAL if worker.worker_id == decode.worker_id else Route.REMOTE
    return RouteDecision(route, worker.worker_id, reason)


def queued_s(worker: WorkerView, model: PerformanceModel) -> float:
    """Prefill time of everything that waits or runs at a worker, in seconds."""
    prefill_s, parallelism = model.prefill_s, worker.parallelism
    total_s = 0.0
    for task in worker.queue:
        total_s += prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
    return total_s


def estimate_local(task: PrefillTask, decode: WorkerView, model: PerformanceModel) -> RouteEstimate:
    """Queue and prefill at the decode worker; nothing moves."""
    prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, decode.parallelism)
    queue_s = queued_s(decode, model)
    return RouteEstimate(Route.LOCAL, decode.worker_id, prefill_s + queue_s, prefill_s, queue_s, 0.0)


def estimate_remote(
    task: PrefillTask, decode: WorkerView, worker: WorkerView, model: PerformanceModel
) -> RouteEstimate:
    """Queue and prefill at a prefill worker, the history that it lacks moved there and the increment back.

    The session's own decode worker, if its role has changed to prefill, is the local route: nothing moves.
    """
    if worker.worker_id == decode.worker_id:
        return estimate_local(task, worker, model)
    source, target = decode.parallelism, worker.parallelism
    missing_tokens = max(task.hist_tokens - worker.held_tokens.get(task.session_id, 0), 0)
    prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, target)
    queue_s = queued_s(worker, model)
    transfer_s = model.kv_transfer_s(task.incr_tokens, target, source)
    if missing_tokens:
        transfer_s += model.kv_transfer_s(missing_tokens, source, target)
    total_s = prefill_s + queue_s + transfer_s
    return RouteEstimate(Route.REMOTE, worker.worker_id, total_s, prefill_s, queue_s, transfer_s)


def least_queued(
    task: PrefillTask,
    decode: WorkerView,
    workers: Sequence[WorkerView],
    model: PerformanceModel,
    rng: random.Random,
    reason: str,
) -> RouteDecision:
    """The decision for the prefill worker with the least queued work, of equals one at random; all are recorded."""
    estimates = tuple([estimate_remote(task, decode, worker, model) for worker in workers])
    best = estimates[one_of_least([estimate.queue_s for estimate in estimates], rng)]
    return RouteDecision(best.route, best.worker_id, reason, estimates)


def one_of_least(values: Sequence[float], rng: random.Random) -> int:
    """Position of the least value; of equals one at random, so that equal workers share the load."""
    least = min(values)
    equals = [position for position, value in enumerate(values) if value == least]
    return equals[0] if len(equals) == 1 else rng.choice(equals)
