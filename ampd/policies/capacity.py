"""Which workers can take a prompt, by KV memory and longest context. A size of 0 is unknown and fits everything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampd.types import PrefillTask, WorkerView


def fits(worker: WorkerView, task: PrefillTask) -> bool:
    """Whether the worker's free KV memory and longest context take the whole prompt."""
    needed = task.context_tokens
    fits_context = worker.max_context_tokens == 0 or needed <= worker.max_context_tokens
    free_tokens = worker.kv_capacity_tokens - worker.kv_used_tokens
    return fits_context and (worker.kv_capacity_tokens == 0 or needed <= free_tokens)


def able(task: PrefillTask, prefill: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """The workers whose longest context takes the prompt."""
    needed = task.context_tokens
    return [view for view in prefill if view.max_context_tokens >= needed or not view.max_context_tokens]


def dispensable(decode: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Decode workers that may leave, because a worker with at least as much KV memory stays."""
    sizes = [worker.kv_capacity_tokens or math.inf for worker in decode]
    largest = max(sizes, default=0)
    if sizes.count(largest) > 1:
        return decode
    return [worker for worker, size in zip(decode, sizes, strict=True) if size < largest]
