"""The routes of a round: the times that the performance model predicts for them, and the decision for one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

from ampd.keys import PAGE_TOKENS
from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoutingSituation, any_of
from ampd.policies.moore_hodgson import Job
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

# -- Passes of the engine: the shortest one, whether mixed ones pay, and how much a pass prefills in a given time.


def shortest_pass_s(model: PerformanceModel, hist_tokens: int, parallelism: Parallelism) -> float:
    """Seconds of a pass for one page of tokens: nearly all of it reads weights, of all experts where there are some."""
    return model.prefill_s(hist_tokens, PAGE_TOKENS, parallelism)


def mixing_pays(
    model: PerformanceModel,
    hist_tokens: int,
    incr_tokens: int,
    batch: int,
    context_tokens: int,
    parallelism: Parallelism,
) -> bool:
    """Whether a pass that prefills and is a step of the batch too takes less time than a pass of each kind."""
    mixed_s = model.mixed_pass_s([(hist_tokens, incr_tokens)], batch, context_tokens, parallelism)
    prefill_s = model.prefill_s(hist_tokens, incr_tokens, parallelism)
    return mixed_s < prefill_s + model.decode_step_s(batch, context_tokens, parallelism)


def tokens_within(
    limit_s: float,
    hist_tokens: int,
    fits: int,
    exceeds: int,
    parallelism: Parallelism,
    model: PerformanceModel,
    *,
    precision_tokens: int = 1,
    guess_tokens: int = 0,
) -> int:
    """The most tokens whose prefill behind `hist_tokens` takes at most `limit_s`, between `fits` and `exceeds`.

    Args:
        fits: the least answer.
        exceeds: more tokens than the answer, unless it is `fits`.
        precision_tokens: the answer may be less by fewer than this number of tokens.
        guess_tokens: a good guess saves most of the search; 0: none.
    """
    stride, probe = 1, guess_tokens
    while exceeds - fits > precision_tokens:
        if not guess_tokens or not fits < probe < exceeds:
            probe = (fits + exceeds) // 2
        if model.prefill_s(hist_tokens, probe, parallelism) <= limit_s:
            fits, probe = probe, probe + stride
        else:
            exceeds, probe = probe, probe - stride
        stride *= 4
    return fits


# -- Which workers can take a prompt, by KV memory and longest context. A size of 0 is unknown and fits everything.


class HasContextLimit(Protocol):
    """A worker, or a view of one. `max_context_tokens` is its longest context, prompt and output together; 0: any."""

    @property
    def max_context_tokens(self) -> int: ...


def has_room(context_tokens: int, worker: HasContextLimit) -> bool:
    """Whether a worker's longest context takes this many tokens, prompt and output together."""
    return is_within(context_tokens, worker.max_context_tokens)


def is_within(context_tokens: int, limit_tokens: int) -> bool:
    """Whether a limit of a context takes this many tokens; 0: any. Compiled, an attribute of a protocol is slow."""
    return not 0 < limit_tokens < context_tokens


def session_memory(worker: WorkerView) -> tuple[int, int]:
    """(used tokens, all tokens) of the memory that keeps sessions between their rounds.

    That is the worker's KV store, or the device's memory where there is no store.
    """
    if worker.store_capacity_tokens:
        return worker.store_used_tokens, worker.store_capacity_tokens
    return worker.kv_used_tokens, worker.kv_capacity_tokens


def fits(worker: WorkerView, task: PrefillTask, shared_tokens: int = 0) -> bool:
    """Whether the worker's free memory for sessions and its device take the prompt, and its context a token more.

    Args:
        shared_tokens: tokens of the prompt's beginning that the worker holds for other sessions. They need no further
            memory.
    """
    needed = task.context_tokens
    fits_device = worker.kv_capacity_tokens == 0 or needed <= worker.kv_capacity_tokens
    used_tokens, capacity_tokens = session_memory(worker)
    fits_memory = capacity_tokens == 0 or needed - shared_tokens <= capacity_tokens - used_tokens
    return is_within(needed + 1, worker.max_context_tokens) and fits_device and fits_memory


def able(task: PrefillTask, prefill: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """The workers whose longest context takes the prompt and its first token."""
    needed = task.context_tokens + 1
    return [view for view in prefill if is_within(needed, view.max_context_tokens)]


def dispensable(decode: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Decode workers that may leave, because a worker with at least as much KV memory stays."""
    sizes = [worker.kv_capacity_tokens or math.inf for worker in decode]
    largest = max(sizes, default=0)
    if sizes.count(largest) > 1:
        return decode
    return [worker for worker, size in zip(decode, sizes, strict=True) if size < largest]


# -- What the routing `predictive` expects of the ordering `on-time` and the slicing `slack`, once for all three.
#
# The routing predicts what the other two do. Its predictions are only right while all of them take the same values.

ITL_SHARE = 0.92
"""Share of the ITL target that prefills may use up."""

ORDERED_PREFILLS = 128
"""Waiting prefills that the ordering looks at. Workers publish as many, and sums of the others, so that a view has at
most about 30 kB."""

MISSED_WEIGHT = 0.5
"""Weight of a round whose session has missed a target before: the session is lost in any case."""


def left_s(task: PrefillTask, now_s: float) -> float:
    """Seconds until a prefill's TTFT target is over."""
    return task.slo.ttft_s - (now_s - task.arrival_s)


def as_job(task: PrefillTask, position: int, time_s: float, now_s: float) -> Job:
    """A prefill that takes `time_s` seconds, as a job: a round whose session has missed a target weighs less."""
    return Job(left_s(task, now_s), time_s, MISSED_WEIGHT if task.session_missed else 1.0, position)


def on_time(tasks: Iterable[PrefillTask], times_s: Iterable[float], stretch: float, now_s: float) -> list[Job]:
    """The queued prefills that can still be on time, as jobs without positions.

    Args:
        times_s: seconds that each prefill takes alone.
        stretch: how many times longer than alone each prefill takes.
    """
    return [
        Job(due_s, time_s, MISSED_WEIGHT if task.session_missed else 1.0, 0)
        for task, alone_s in zip(tasks, times_s, strict=True)
        if (time_s := alone_s * stretch) <= (due_s := left_s(task, now_s))
    ]


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
