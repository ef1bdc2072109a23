"""Elastic pools after Arrow (2025): a worker changes sides the moment that the other side misses its target."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import Enum

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoleChange
from ampd.policies.estimates import one_of_least, queued_s
from ampd.policies.pools.predictive import dispensable
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, Role, Slo, WorkerView

_IDLE_TTFT_SHARE = 0.5
"""Of the TTFT target: a prefill worker whose windowed TTFT is above it is not idle, though nothing may wait now."""

_MOST_SEQUENCES = 4096


class Pool(Enum):
    """Arrow's four pools: a side, or on the way to it with work of the other side left."""

    PREFILL = "P"
    DECODE = "D"
    TO_PREFILL = "D->P"
    TO_DECODE = "P->D"


def pool_of(worker: WorkerView) -> Pool:
    """The pool that a worker is in, from its role and from what of the other role is left there.

    What a decode worker has in its queue is of its own sessions where it holds their whole history. The prefill of a
    session's first round, which has none, counts as left from its time as a prefill worker.
    """
    if worker.role is Role.PREFILL:
        return Pool.TO_PREFILL if worker.decode_batch else Pool.PREFILL
    held = worker.held_tokens
    is_left = any(not task.hist_tokens or held.get(task.session_id, 0) < task.hist_tokens for task in worker.queue)
    return Pool.TO_DECODE if is_left else Pool.DECODE


@register("pools", "arrow")
class ArrowPools(Policy):
    """Turn a decode worker into a prefill worker when the next round would miss its TTFT, and back when decoding
    needs it (stateless instances, elastic pools).

    Reads: role, queue, held prefixes, decode batch and its context, windowed TTFT and ITL, KV memory of all workers;
    prefill and decode times of the performance model; the targets.

    Rule: a worker is in one of four pools: P (prefill), D (decode), D->P (prefill worker whose batch still decodes),
    P->D (decode worker that still has prefills in its queue). At most one worker changes sides at a time, and none
    within `cooldown_s` of the last change.

    1. `ttft-miss`, D to P: the least predicted TTFT over P and D->P (queued work plus the mean prefill of what is
       queued anywhere) misses the target, the worker would do better, and decode load is low: the other decode workers
       would have at most `low_load` of the running tokens that they can carry, and the ITL target is met. P->D goes
       first, then D, the fewest running tokens. What a worker can carry: the largest batch of the mean context whose
       step meets the ITL target and whose KV fits.
    2. `itl-miss`, P to D: the windowed ITL of all that decode, weighted by tokens, exceeds the target, and no decode
       worker is empty (it would take the next sessions first). D->P goes first, then P, the least queued work.
    3. `prefill-idle`, P to D: no prefill worker has work or was close to its target lately, while the decode workers
       have more than `high_load` of what they can carry.

    At least one worker of each role remains, and one of the decode workers with the most KV memory.

    Limits: it is asked now and then and not at every round, so that it stands for the rounds to come by the mean of
    those that wait. A session stays on the decode worker that it is bound to: a worker that has changed to prefill goes
    on decoding its sessions, paused by prefills, and one that has changed to decode helps only sessions to come. P->D
    is inferred: a decode worker's own prefill of a first round looks like one that is left over. Where many rounds are
    prefilled locally their pauses raise the ITL, and prefill workers are given away for it.

    Example: `--pools arrow`
    """

    low_load: float = Field(
        0.6, gt=0, description="Share of what decode workers can carry up to which one of them may leave."
    )
    high_load: float = Field(
        0.8, gt=0, description="Share of what decode workers can carry above which idle prefill workers help."
    )
    cooldown_s: float = Field(1.0, ge=0, description="Least time between two changes, in seconds.")

    def change(
        self,
        workers: Sequence[WorkerView],
        slo: Slo,
        model: PerformanceModel,
        now_s: float,
        changed_s: float,
        rng: random.Random,
    ) -> Sequence[RoleChange]:
        """At most one worker that changes its role."""
        if now_s - changed_s < self.cooldown_s:
            return ()
        prefill = [worker for worker in workers if worker.role is Role.PREFILL]
        decode = [worker for worker in workers if worker.role is Role.DECODE]
        itl_missed = _interval_s(workers) > slo.itl_s
        if itl_missed:
            is_one_empty = any(not worker.decode_batch and not worker.queue for worker in decode)
            return () if is_one_empty else _to_decode(prefill, model, rng, "itl-miss")
        if _are_idle(prefill, slo):
            is_busy = _load(decode, decode, slo, model) > self.high_load
            return _to_decode(prefill, model, rng, "prefill-idle") if is_busy else ()
        return self._to_prefill(prefill, decode, slo, model, rng)

    def _to_prefill(
        self,
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        slo: Slo,
        model: PerformanceModel,
        rng: random.Random,
    ) -> Sequence[RoleChange]:
        able = dispensable(decode)
        if not able or not any(worker.queue for worker in (*prefill, *decode)):
            return ()
        next_s = _next_prefill_s((*prefill, *decode), model)
        least_s = min((queued_s(worker, model) + next_s[worker.parallelism] for worker in prefill), default=math.inf)
        if least_s <= slo.ttft_s:
            return ()
        leaving = [worker for worker in able if pool_of(worker) is Pool.TO_DECODE] or able
        chosen = leaving[one_of_least([worker.decode_context_tokens for worker in leaving], rng)]
        rest = [worker for worker in decode if worker is not chosen]
        if queued_s(chosen, model) + next_s[chosen.parallelism] >= least_s:
            return ()
        if _load(decode, rest, slo, model) > self.low_load:
            return ()
        return (RoleChange(chosen.worker_id, Role.PREFILL, "ttft-miss"),)


def _to_decode(
    prefill: Sequence[WorkerView], model: PerformanceModel, rng: random.Random, reason: str
) -> Sequence[RoleChange]:
    if len(prefill) < 2:
        return ()
    leaving = [worker for worker in prefill if pool_of(worker) is Pool.TO_PREFILL] or prefill
    chosen = leaving[one_of_least([queued_s(worker, model) for worker in leaving], rng)]
    return (RoleChange(chosen.worker_id, Role.DECODE, reason),)


def _are_idle(prefill: Sequence[WorkerView], slo: Slo) -> bool:
    limit_s = _IDLE_TTFT_SHARE * slo.ttft_s
    return bool(prefill) and not any(
        worker.queue or (worker.ttft.count and worker.ttft.mean_s > limit_s) for worker in prefill
    )


def _interval_s(workers: Sequence[WorkerView]) -> float:
    """Mean interval between tokens over all workers that decode; 0 without samples."""
    count = sum(worker.itl.count for worker in workers)
    return sum(worker.itl.mean_s * worker.itl.count for worker in workers) / count if count else 0.0


def _next_prefill_s(workers: Sequence[WorkerView], model: PerformanceModel) -> dict[Parallelism, float]:
    """Mean prefill time of what is queued anywhere, by the parallelism of who would do it."""
    tasks = [task for worker in workers for task in worker.queue]
    return {
        parallelism: sum(model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism) for task in tasks)
        / max(len(tasks), 1)
        for parallelism in {worker.parallelism for worker in workers}
    }


def _load(running: Sequence[WorkerView], carrying: Sequence[WorkerView], slo: Slo, model: PerformanceModel) -> float:
    """The running tokens of some workers as a share of what `carrying` can carry within the ITL target."""
    batch = sum(worker.decode_batch for worker in running)
    tokens = sum(worker.decode_context_tokens for worker in running)
    if not batch or not tokens:
        return 0.0
    mean_tokens = tokens / batch
    return tokens / sum(_carried_tokens(worker, mean_tokens, slo, model) for worker in carrying)


def _carried_tokens(worker: WorkerView, mean_tokens: float, slo: Slo, model: PerformanceModel) -> float:
    """Context of the largest batch that meets the ITL target and fits; that of one sequence at least."""
    most = int(worker.kv_capacity_tokens / mean_tokens) if worker.kv_capacity_tokens else _MOST_SEQUENCES
    low, high = 1, min(max(most, 1), _MOST_SEQUENCES) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if model.decode_step_s(middle, int(middle * mean_tokens), worker.parallelism) <= slo.itl_s:
            low = middle
        else:
            high = middle
    return low * mean_tokens
