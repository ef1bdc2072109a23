"""Our pools: a worker changes sides when the other side's predicted time no longer fits its target."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from math import inf

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import RoleChange
from ampd.policies.estimates import one_of_least, queued_s
from ampd.policies.registry import Policy, register
from ampd.types import Role, Slo, WorkerView


@register("pools", "predictive")
class PredictivePools(Policy):
    """Turn a prefill worker into a decode worker when decode steps come close to their target, and back when there is
    room again.

    Reads: role, queue, decode batch and its context, KV memory of all workers; prefill and step times of the
    performance model; the targets. No windows of measured ITL: our slicing spends on prefills what the target leaves
    over, so a measured ITL near its target says nothing about the load.

    Rule: at most one worker changes, and none within `cooldown_s` of the last change.

    1. `itl-short`: the mean over the decode workers of the modelled step of their batch is above `high` of the ITL
       target: the prefill worker with the least queued work becomes a decode worker, even the last one. A decode worker
       prefills its own sessions in slices, so nothing is lost but the separation. So it is without any decode worker.
    2. `ttft-short`: every prefill worker (without any: every decode worker) has more than half a TTFT target of work
       queued, and the decode batches would still fit on one worker less, with steps below `low` of the target: the
       decode worker with the smallest batch becomes a prefill worker. Its sessions stay and go on. One of the decode
       workers with the most KV memory remains, for a session that fits nowhere else.
    3. Memory: with more than `full` of the decode workers' KV memory in use a prefill worker becomes a decode worker
       (`kv-short`), for a session that loses its KV computes its whole context again; and none goes the other way if
       what is held would take more than half of `full` of the memory that remains, for sessions grow.

    Limits: a change helps the sessions to come, for sessions stay where they are bound. One change in `cooldown_s` is
    slow for a burst of seconds; the routing answers those.

    Example: `--pools predictive`
    """

    high: float = Field(0.6, gt=0, description="Step time, as a share of the ITL target, above which decode is short.")
    low: float = Field(
        0.35, gt=0, description="Step time, as a share of the ITL target, that leaves a worker to spare."
    )
    full: float = Field(
        0.8, gt=0, description="Share of the KV memory in use above which decode workers are short of it."
    )
    cooldown_s: float = Field(5.0, ge=0, description="Least time between two changes, in seconds.")

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
        reason = "itl-short" if _step_share(decode, 0, slo, model) > self.high else "kv-short"
        if prefill and (reason == "itl-short" or _kv_share(decode, decode) > self.full):
            chosen = prefill[one_of_least([queued_s(worker, model) for worker in prefill], rng)]
            return (RoleChange(chosen.worker_id, Role.DECODE, reason),)
        is_late = all(queued_s(worker, model) > 0.5 * slo.ttft_s for worker in prefill or decode)
        leaving = dispensable(decode)
        if is_late and leaving and len(decode) > 1 and _step_share(decode, 1, slo, model) < self.low:
            chosen = leaving[one_of_least([float(worker.decode_batch) for worker in leaving], rng)]
            rest = [worker for worker in decode if worker is not chosen]
            if _kv_share(decode, rest) <= 0.5 * self.full:
                return (RoleChange(chosen.worker_id, Role.PREFILL, "ttft-short"),)
        return ()


def _step_share(decode: Sequence[WorkerView], fewer: int, slo: Slo, model: PerformanceModel) -> float:
    """Mean modelled step of the decode workers over the ITL target; with `fewer` workers, their load spread evenly."""
    if not decode:
        return inf  # nobody decodes: nothing could be shorter
    loads = [(worker.decode_batch, worker.decode_context_tokens) for worker in decode]
    if fewer:
        rest = len(decode) - fewer
        loads = [(round(sum(one[0] for one in loads) / rest), round(sum(one[1] for one in loads) / rest))] * len(decode)
    steps_s = [
        model.decode_step_s(batch, context_tokens, worker.parallelism)
        for worker, (batch, context_tokens) in zip(decode, loads, strict=True)
    ]
    return sum(steps_s) / len(steps_s) / slo.itl_s


def _kv_share(decode: Sequence[WorkerView], holding: Sequence[WorkerView]) -> float:
    """KV that the decode workers have in use, over the memory of those that hold it from now on; 0: unlimited."""
    capacity_tokens = sum(worker.kv_capacity_tokens for worker in holding)
    if not capacity_tokens:
        return 0.0
    return sum(worker.kv_used_tokens for worker in decode) / capacity_tokens


def dispensable(decode: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Decode workers without which the others can still take every session that some decode worker can take."""
    sizes = [worker.kv_capacity_tokens or math.inf for worker in decode]
    largest = max(sizes, default=0)
    if sizes.count(largest) > 1:
        return decode
    return [worker for worker, size in zip(decode, sizes, strict=True) if size < largest]
