"""Which workers can take a prompt, by KV memory and longest context. A size of 0 is unknown and fits everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ampd.types import PrefillTask, WorkerView


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
