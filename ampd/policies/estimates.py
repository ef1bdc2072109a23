"""The routes of a round: the times that the performance model predicts for them, and the decision for one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoutingSituation
from ampd.policies.chance import any_of
from ampd.policies.expectations import ITL_SHARE
from ampd.policies.passes import shortest_pass_s
from ampd.types import (
    Parallelism,
    PrefillTask,
    QueueRest,
    Route,
    RouteDecision,
    RouteEstimate,
    WorkerView,
    usable_tokens,
)

NO_PREFILL_WORKER = "no-prefill-worker"
"""Reason of a local route where no live prefill worker can take the prompt."""


def local(worker: WorkerView, reason: str, estimates: tuple[RouteEstimate, ...] = ()) -> RouteDecision:
    """The decision to prefill on the session's decode worker."""
    return RouteDecision(Route.LOCAL, worker.worker_id, reason, estimates)


def towards(worker: WorkerView, decode: WorkerView, reason: str) -> RouteDecision:
    """The decision for a worker that no estimate chose; local if it is the session's decode worker."""
    route = Route.LOCAL if worker.worker_id == decode.worker_id else Route.REMOTE
    return RouteDecision(route, worker.worker_id, reason)


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """Predicted times of the prefills at a worker.

    Attributes:
        model, parallelism, rest: what they were predicted for, beside the queue.
        listed_s: seconds of each prefill that the view lists.
        total_s: seconds of all prefills, one after the other.
        in_passes_s: seconds of all prefills. Short ones share passes, so that only the first pays a pass's fixed time.
    """

    model: PerformanceModel
    parallelism: Parallelism
    rest: QueueRest
    listed_s: Sequence[float]
    total_s: float
    in_passes_s: float


class Queue(tuple[PrefillTask, ...]):
    """The prefills of a queue, in order, with their last predicted times: many decisions ask for those of one queue."""

    times: QueueTimes | None = None


def queue_times(worker: WorkerView, model: PerformanceModel) -> QueueTimes:
    """The predicted times of the prefills at a worker.

    Raises:
        UserError: the model lacks the worker's parallelism.
    """
    queue, parallelism, rest = worker.queue, worker.parallelism, worker.queue_rest
    if not isinstance(queue, Queue):
        return _added_up(queue, model, parallelism, rest)
    times = queue.times
    if times is None or times.model is not model or times.parallelism is not parallelism or times.rest is not rest:
        times = queue.times = _added_up(queue, model, parallelism, rest)
    return times


def _added_up(
    queue: Sequence[PrefillTask], model: PerformanceModel, parallelism: Parallelism, rest: QueueRest
) -> QueueTimes:
    listed_s = [model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism) for task in queue]
    all_s = [*listed_s, *[mean_rest_s(rest, model, parallelism)] * rest.tasks] if rest.tasks else listed_s
    fixed_s = shortest_pass_s(model, 0, parallelism)
    short_s = [time_s for time_s in all_s if time_s < 2.0 * fixed_s]
    in_passes_s = [time_s for time_s in all_s if time_s >= 2.0 * fixed_s]
    in_passes_s += [time_s - fixed_s for time_s in short_s if time_s > fixed_s]
    in_passes_s += [min(time_s, fixed_s) for time_s in short_s[:1]]
    return QueueTimes(model, parallelism, rest, listed_s, fsum(all_s), fsum(in_passes_s))


def mean_rest_s(rest: QueueRest, model: PerformanceModel, parallelism: Parallelism) -> float:
    """Mean prefill time of the waiting tasks that a view only counts and does not list. There must be at least one."""
    return model.prefill_s(rest.hist_tokens // rest.tasks, rest.incr_tokens // rest.tasks, parallelism)


def queued_s(worker: WorkerView, model: PerformanceModel) -> float:
    """Prefill time of all tasks at a worker, one after the other."""
    return queue_times(worker, model).total_s


def queued_in_passes_s(worker: WorkerView, model: PerformanceModel) -> float:
    """Prefill time of all tasks at a worker. Short ones share passes."""
    return queue_times(worker, model).in_passes_s


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
    return max(task.hist_tokens, usable_tokens(shared_tokens, task.context_tokens))


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
    return RouteEstimate(Route.LOCAL, decode.worker_id, total_s, prefill_s, queue_s, transfer_s)


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
    return RouteEstimate(Route.REMOTE, worker.worker_id, total_s, prefill_s, queue_s, transfer_s)


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
