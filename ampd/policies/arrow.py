"""Arrow (2025): stateless instances in elastic pools. A worker changes its role as soon as the other role needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import BindingSituation, PoolsSituation, RoleChange, RoutingSituation
from ampd.policies.estimates import (
    NO_PREFILL_WORKER,
    able,
    dispensable,
    estimate_remote,
    fits,
    index_of_least,
    local,
    queued_s,
    step_with_s,
)
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, Role, RouteDecision, RouteEstimate, WorkerView

_IDLE_TTFT_SHARE = 0.5
"""Share of the TTFT target. A prefill worker whose windowed TTFT is above it is not idle, even with an empty queue."""

_LOW_LOAD, _HIGH_LOAD = 0.6, 0.8
"""Shares of what decode workers can carry: up to the first one of them may leave, above the second idle prefill workers
help."""

_MOST_SEQUENCES = 4096


class Pool(Enum):
    """Arrow's four pools: a worker has a role, or is on the way to it and still has work of the other role."""

    PREFILL = "P"
    DECODE = "D"
    TO_PREFILL = "D->P"
    TO_DECODE = "P->D"


def pool_of(worker: WorkerView) -> Pool:
    """The pool that a worker is in, from its role and from the work of the other role that is left there.

    A prefill in a decode worker's queue belongs to one of its own sessions if the worker holds its whole history. The
    prefill of a session's first round has no history. It counts as left from the time as a prefill worker.
    """
    if worker.role is Role.PREFILL:
        return Pool.TO_PREFILL if worker.decode_batch else Pool.PREFILL
    held = worker.held_tokens
    is_left = any(not task.hist_tokens or held.get(task.session_id, 0) < task.hist_tokens for task in worker.queue)
    return Pool.TO_DECODE if is_left else Pool.DECODE


@register("binding", "arrow")
class ArrowBinding(Policy):
    """Bind a session to the decode worker with the fewest running tokens among those that keep the ITL target.

    Reads: each decode worker's batch, its context and windowed ITL, queue and held history, KV memory and longest
    context; step times of the performance model; the round's ITL target.

    Rule: workers whose free KV memory and context length take the whole prompt come first. A worker has room if its
    windowed ITL meets the target, its running tokens with this prompt fit its KV memory, and a modelled step with
    them meets the target. Workers with prefills left from their time as prefill workers (pool P->D) come after the
    others (D).

    1. The worker of D with the fewest running tokens among those with room.
    2. Otherwise the same in P->D.
    3. Otherwise the one with the fewest running tokens of all. Of equal workers it takes a random one.

    Limits: it decides once per session. Sessions in a tool call do not count as running, though their KV stays.

    Example: `--binding arrow`
    """

    def bind(self, situation: BindingSituation) -> str:
        workers = [worker for worker in situation.decode if fits(worker, situation.task)] or situation.decode
        roomy = [worker for worker in workers if self._has_room(situation, worker)]
        settled = [worker for worker in roomy if pool_of(worker) is Pool.DECODE]
        candidates = settled or roomy or workers
        index = index_of_least([worker.decode_context_tokens for worker in candidates], situation.rng)
        return candidates[index].worker_id

    def _has_room(self, situation: BindingSituation, worker: WorkerView) -> bool:
        task, itl_slo_s = situation.task, situation.task.slo.itl_s
        if worker.itl.count and worker.itl.mean_s > itl_slo_s:
            return False
        running_tokens = worker.decode_context_tokens + task.context_tokens
        if 0 < worker.kv_capacity_tokens < running_tokens:
            return False
        return step_with_s(situation.model, worker, task.context_tokens) <= itl_slo_s


@register("routing", "arrow")
class ArrowRouting(Policy):
    """Prefill where the predicted TTFT is least, on workers that still decode only if the target needs them.

    Reads: queue, held prefix, longest context and decode batch of every prefill worker; prefill and transfer times
    of the performance model; the round's arrival and TTFT target.

    Rule: prefill workers without a decode batch are pool P. Those that still have one, from their time as decode
    workers, are pool D->P. The predicted TTFT is the time since arrival plus the sum of queue, prefill and
    transfer. Of equal workers it takes a random one.

    1. `prefill`: the worker of P with the least predicted TTFT, if that meets the target.
    2. `decode-to-prefill`: otherwise the same in D->P, if that meets the target.
    3. `least-delay`: otherwise the worker of P with the least; where P is empty, that of D->P.

    Without a prefill worker that can take the prompt: local, `no-prefill-worker`.

    Limits: a session stays bound to its decode worker, so its round is only local if that worker is a prefill
    worker now. A long decode batch makes prefills at a worker that still decodes slower than predicted.

    Example: `--routing arrow`, with `--binding arrow --pools arrow`
    """

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task = situation.task
        workers = able(task, situation.prefill)
        if not workers:
            return local(situation.decode, NO_PREFILL_WORKER)
        estimates = tuple([estimate_remote(situation, worker) for worker in workers])
        left_s = task.slo.ttft_s - max(situation.now_s - task.arrival_s, 0.0)
        settled = _least(situation, Pool.PREFILL, workers, estimates)
        if settled and settled.total_s <= left_s:
            return RouteDecision(settled.route, settled.worker_id, "prefill", estimates)
        changed = _least(situation, Pool.TO_PREFILL, workers, estimates)
        if changed and changed.total_s <= left_s:
            return RouteDecision(changed.route, changed.worker_id, "decode-to-prefill", estimates)
        best = settled or changed
        if best is None:  # only mixed workers, which Arrow does not know
            return local(situation.decode, NO_PREFILL_WORKER)
        return RouteDecision(best.route, best.worker_id, "least-delay", estimates)


def _least(
    situation: RoutingSituation, pool: Pool, workers: Sequence[WorkerView], estimates: Sequence[RouteEstimate]
) -> RouteEstimate | None:
    """The pool's worker with the least predicted TTFT; None if the pool is empty."""
    own = [estimate for estimate, worker in zip(estimates, workers, strict=True) if pool_of(worker) is pool]
    return own[index_of_least([estimate.total_s for estimate in own], situation.rng)] if own else None


@register("pools", "arrow")
class ArrowPools(Policy):
    """Turn a decode worker into a prefill worker when the next round would miss its TTFT, and back when decoding needs
    it (stateless instances, elastic pools).

    Reads: role, queue, held prefixes, decode batch and its context, windowed TTFT and ITL, KV memory of all
    workers; prefill and decode times of the performance model; the targets.

    Rule: a worker is in one of four pools: P (prefill), D (decode), D->P (prefill worker whose batch still
    decodes), P->D (decode worker that still has prefills in its queue). At most one worker changes its role at a
    time, and none within `cooldown_s` of the last change.

    1. `ttft-miss`, D to P: the least predicted TTFT over P and D->P misses the target, the worker would do better,
       the other decode workers would have at most 60 % of the running tokens that they can carry, and the ITL
       target is met. P->D goes first, then D, the fewest running tokens.
    2. `itl-miss`, P to D: the windowed ITL of all that decode exceeds the target, and no decode worker is empty.
       D->P goes first, then P, the least queued work.
    3. `prefill-idle`, P to D: no prefill worker has work or was close to its target lately, while the decode
       workers have more than 80 % of what they can carry.

    At least one worker of each role remains, and one of the decode workers with the most KV memory.

    Limits: it decides at intervals, so the mean of the waiting rounds stands for the rounds to come. Sessions stay
    where they are bound. Where many rounds are prefilled locally their pauses raise the ITL, and prefill workers
    are given away for it.

    Example: `--pools arrow`
    """

    cooldown_s: float = Field(1.0, ge=0, description="Least time between two changes, in seconds.")

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        if situation.changed_within(self.cooldown_s):
            return ()
        prefill = [worker for worker in situation.workers if worker.role is Role.PREFILL]
        decode = [worker for worker in situation.workers if worker.role is Role.DECODE]
        if _interval_s(situation.workers) > situation.slo.itl_s:
            is_any_empty = any(not worker.decode_batch and not worker.queue for worker in decode)
            return () if is_any_empty else _to_decode(situation, prefill, "itl-miss")
        if _are_idle(prefill, situation.slo.ttft_s):
            is_busy = _load(situation, decode, decode) > _HIGH_LOAD
            return _to_decode(situation, prefill, "prefill-idle") if is_busy else ()
        return self._to_prefill(situation, prefill, decode)

    def _to_prefill(
        self, situation: PoolsSituation, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]
    ) -> Sequence[RoleChange]:
        model, ttft_s = situation.model, situation.slo.ttft_s
        candidates = dispensable(decode)
        if not candidates or not any(worker.queue for worker in (*prefill, *decode)):
            return ()
        next_s = _next_prefill_s((*prefill, *decode), model)
        least_s = min((queued_s(worker, model) + next_s[worker.parallelism] for worker in prefill), default=math.inf)
        if least_s <= ttft_s:
            return ()
        leaving = [worker for worker in candidates if pool_of(worker) is Pool.TO_DECODE] or candidates
        chosen = leaving[index_of_least([worker.decode_context_tokens for worker in leaving], situation.rng)]
        remaining = [worker for worker in decode if worker is not chosen]
        if queued_s(chosen, model) + next_s[chosen.parallelism] >= least_s:
            return ()
        if _load(situation, decode, remaining) > _LOW_LOAD:
            return ()
        return (RoleChange(chosen.worker_id, Role.PREFILL, "ttft-miss"),)


def _to_decode(situation: PoolsSituation, prefill: Sequence[WorkerView], reason: str) -> Sequence[RoleChange]:
    if len(prefill) < 2:
        return ()
    leaving = [worker for worker in prefill if pool_of(worker) is Pool.TO_PREFILL] or prefill
    chosen = leaving[index_of_least([queued_s(worker, situation.model) for worker in leaving], situation.rng)]
    return (RoleChange(chosen.worker_id, Role.DECODE, reason),)


def _are_idle(prefill: Sequence[WorkerView], ttft_slo_s: float) -> bool:
    limit_s = _IDLE_TTFT_SHARE * ttft_slo_s
    return bool(prefill) and not any(
        worker.queue or (worker.ttft.count and worker.ttft.mean_s > limit_s) for worker in prefill
    )


def _interval_s(workers: Sequence[WorkerView]) -> float:
    """Mean interval between tokens over all workers that decode; 0 without samples."""
    count = sum(worker.itl.count for worker in workers)
    return sum(worker.itl.mean_s * worker.itl.count for worker in workers) / count if count else 0.0


def _next_prefill_s(workers: Sequence[WorkerView], model: PerformanceModel) -> dict[Parallelism, float]:
    """Mean time of all queued prefills, by the parallelism of the worker that would compute them."""
    tasks = [task for worker in workers for task in worker.queue]
    return {
        parallelism: sum(model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism) for task in tasks)
        / max(len(tasks), 1)
        for parallelism in {worker.parallelism for worker in workers}
    }


def _load(situation: PoolsSituation, running: Sequence[WorkerView], carrying: Sequence[WorkerView]) -> float:
    """The running tokens of some workers as a share of what `carrying` can carry within the ITL target."""
    batch = sum(worker.decode_batch for worker in running)
    tokens = sum(worker.decode_context_tokens for worker in running)
    if not batch or not tokens:
        return 0.0
    mean_tokens = tokens / batch
    return tokens / sum(_carried_tokens(situation, worker, mean_tokens) for worker in carrying)


def _carried_tokens(situation: PoolsSituation, worker: WorkerView, mean_tokens: float) -> float:
    """Context of the largest batch that meets the ITL target and fits; at least the context of one sequence."""
    most = int(worker.kv_capacity_tokens / mean_tokens) if worker.kv_capacity_tokens else _MOST_SEQUENCES
    low, high = 1, min(max(most, 1), _MOST_SEQUENCES) + 1
    while high - low > 1:
        middle = (low + high) // 2
        step_s = situation.model.decode_step_s(middle, int(middle * mean_tokens), worker.parallelism)
        if step_s <= situation.slo.itl_s:
            low = middle
        else:
            high = middle
    return low * mean_tokens
