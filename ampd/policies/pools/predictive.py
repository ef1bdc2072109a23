"""Our pools: a worker changes its role when the predicted time of the other role no longer fits its target."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.estimates import dispensable, index_of_least, queued_s, session_memory
from ampd.policies.registry import Policy, register
from ampd.types import Role, WorkerView

KV_SHORT = "kv-short"
"""Reason of a change: the decode workers are short of KV memory."""


@register("pools", "predictive")
class PredictivePools(Policy):
    """Turn a prefill worker into a decode worker when decode steps come close to their target, and back when decode
    steps have room again.

    Reads: role, queue, decode batch and its context, KV memory of all workers; prefill and step times of the
    performance model; the targets. The slicing `slack` spends on prefills what the ITL target leaves over, so the
    measured ITL does not show the load.

    Rule: at most one worker changes, and none within 5 s of the last change.

    1. `itl-short`: the mean over the decode workers of the modelled step of their batch is above 60 % of the ITL
       target, or there is no decode worker. The prefill worker with the least queued work becomes a decode worker,
       even the last one.
    2. `ttft-short`: every prefill worker (without any: every decode worker) has more than half a TTFT target of
       work queued, and one decode worker fewer would still hold the decode batches, with steps below 35 % of the
       target. The decode worker with the smallest batch becomes a prefill worker. One of the decode workers with
       the most KV memory remains.
    3. Memory: with more than 80 % of the decode workers' KV memory in use, a prefill worker becomes a decode worker
       (`kv-short`). No decode worker becomes a prefill worker if the KV that is held would take more than 40 % of
       the memory that remains.

    A mixed worker counts as a decode worker, and in rule 2 also as a prefill worker. No worker becomes mixed.

    Limits: a new owner gets the sessions to come, and those that leave a full memory (`--moves needed`). One change
    in 5 s is too slow for a burst of seconds; the routing answers such bursts.

    Example: `--pools predictive`
    """

    HIGH: ClassVar[float] = 0.6
    """Step time, as a share of the ITL target, above which decode is short."""
    LOW: ClassVar[float] = 0.35
    """Step time, as a share of the ITL target, that leaves a worker to spare."""
    FULL: ClassVar[float] = 0.8
    """Share of the KV memory in use above which decode workers are short of it."""
    COOLDOWN_S: ClassVar[float] = 5.0
    """Least time between two changes."""

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        if situation.changed_within(self.COOLDOWN_S):
            return ()
        model, workers, ttft_s = situation.model, situation.workers, situation.slo.ttft_s
        prefill = [worker for worker in workers if worker.role is Role.PREFILL]
        decode = [worker for worker in workers if worker.role.owns_sessions]
        helping = [worker for worker in workers if worker.role.takes_prefills]
        reason = "itl-short" if _step_share(situation, decode, 0) > self.HIGH else KV_SHORT
        if prefill and (reason == "itl-short" or kv_share(decode, decode) > self.FULL):
            chosen = prefill[index_of_least([queued_s(worker, model) for worker in prefill], situation.rng)]
            return (RoleChange(chosen.worker_id, Role.DECODE, reason),)
        is_late = all(queued_s(worker, model) > 0.5 * ttft_s for worker in helping or decode)
        leaving = dispensable(decode)
        if is_late and leaving and len(decode) > 1 and _step_share(situation, decode, 1) < self.LOW:
            chosen = leaving[index_of_least([float(worker.decode_batch) for worker in leaving], situation.rng)]
            remaining = [worker for worker in decode if worker is not chosen]
            if self.leaves_room(kv_share(decode, remaining)):
                return (RoleChange(chosen.worker_id, Role.PREFILL, "ttft-short"),)
        return ()

    def leaves_room(self, share: float) -> bool:
        """Whether an owner of sessions may go if their KV then takes this share of the memory. Sessions grow."""
        return share <= 0.5 * self.FULL


def _step_share(situation: PoolsSituation, decode: Sequence[WorkerView], fewer: int) -> float:
    """Mean modelled decode step, as a share of the ITL target, if `fewer` workers have left and load is even."""
    if not decode:
        return inf  # no worker decodes: the shortage could not be worse
    loads = [(worker.decode_batch, worker.decode_context_tokens) for worker in decode]
    if fewer:
        remaining = len(decode) - fewer
        batch, context_tokens = (round(sum(sizes) / remaining) for sizes in zip(*loads, strict=True))
        loads = [(batch, context_tokens)] * len(decode)
    steps_s = [
        situation.model.decode_step_s(batch, context_tokens, worker.parallelism)
        for worker, (batch, context_tokens) in zip(decode, loads, strict=True)
    ]
    return sum(steps_s) / len(steps_s) / situation.slo.itl_s


def kv_share(decode: Sequence[WorkerView], holding: Sequence[WorkerView]) -> float:
    """KV of sessions on the decode workers, as a share of the memory of those that remain; 0: unlimited memory."""
    capacity_tokens = sum(session_memory(worker)[1] for worker in holding)
    if not capacity_tokens:
        return 0.0
    return sum(session_memory(worker)[0] for worker in decode) / capacity_tokens
