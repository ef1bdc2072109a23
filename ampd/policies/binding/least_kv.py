"""Binding policies: which decode worker owns a new session."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, WorkerView


@register("binding", "least-kv")
class LeastKv(Policy):
    """Bind a session to the decode worker with the least KV memory in use.

    Reads: each decode worker's used and total KV memory, its longest context, and how many sessions it holds.

    Order: workers whose free KV memory and context length take the whole prompt come first; among those the fewest KV
    tokens in use; then the fewest sessions held; then one of the equals at random, so that several coordinators with
    the same view do not all choose the same worker.

    Limits: it counts tokens and not shares, so a worker with more memory is not preferred for having it; it does not
    know what the sessions that are already bound will still need. A total of 0 counts as unknown and fits everything.

    Example: `--binding least-kv`
    """

    def bind(
        self,
        task: PrefillTask,
        decode: Sequence[WorkerView],
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> str:
        """The chosen worker's id."""
        keys = [(not fits(worker, task), worker.kv_used_tokens, len(worker.held_tokens)) for worker in decode]
        best = min(keys)
        equals = [worker for worker, key in zip(decode, keys, strict=True) if key == best]
        return (equals[0] if len(equals) == 1 else rng.choice(equals)).worker_id


def fits(worker: WorkerView, task: PrefillTask) -> bool:
    """Whether the worker's free KV memory and longest context take the whole prompt (0: unknown, counts as yes)."""
    needed = task.context_tokens
    fits_context = worker.max_context_tokens == 0 or needed <= worker.max_context_tokens
    free_tokens = worker.kv_capacity_tokens - worker.kv_used_tokens
    return fits_context and (worker.kv_capacity_tokens == 0 or needed <= free_tokens)
