"""A worker's parts on an engine in this process, with a store in memory and without Dynamo."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampd.perf.corrections import CorrectedModel
from ampd.policies.registry import create
from tests.memory_store import MemoryStore
from workers.parts import WorkerParts
from workers.settings import WorkerSettings


def worker_parts(
    worker_id: str,
    engine: Any,
    model: Any,
    *,
    store: MemoryStore | None = None,
    ordering: str = "fcfs",
    ordering_policy: Any = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> WorkerParts:
    """Parts with the given settings.

    Args:
        ordering_policy: a policy object instead of the named ordering.
    """
    usual: dict[str, Any] = {"role": "decode", "engine": "modelled", "model": Path("m"), "ordering": ordering}
    return WorkerParts(
        worker_id,
        WorkerSettings(**usual | settings),
        engine,
        store or MemoryStore(),
        model if isinstance(model, CorrectedModel) else CorrectedModel(model, engine.info.parallelism),
        ordering_policy or create("ordering", ordering),
        clock,
    )
