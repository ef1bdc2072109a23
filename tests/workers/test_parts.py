"""A worker's parts, connected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ampd.perf.presets import load_performance_model
from ampd.types import Parallelism
from tests.memory_store import MemoryStore
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts
from tests.workers.rounds_lab import chunks_of, message
from workers.parts import WorkerParts


async def test_kv_that_grows_during_a_round_is_published_with_the_samples() -> None:
    info = SimpleNamespace(parallelism=Parallelism(4), page_size_tokens=16)
    engine = SimpleNamespace(kv=SimpleNamespace(), info=info)
    parts = worker_parts("D", engine, load_performance_model("qwen3-32b-h20"))
    async with parts.sessions.round("s"):
        parts.held("s", 16)
        parts.changes.clear()
        parts.held("s", 32)
        assert not await parts.changes.wait_changed(0.0)
        assert parts.changes.has_samples
    parts.held("s", 48)
    assert await parts.changes.wait_changed(0.0)


async def rounds_of(parts: WorkerParts, *session_ids: str) -> None:
    """Each session has a round of two pages."""
    for seed, session_id in enumerate(session_ids):
        call: Any = message(prompt_of(40, seed=seed), 2, session_id)
        assert [chunk async for chunk in chunks_of(parts.rounds.generate, call)]


async def test_a_session_that_ends_is_released_with_its_last_round(model_folder: Path) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        parts = worker_parts("D", engine, lab.times)
        engine.kv.connect(lab.peers, parts.held)
        await rounds_of(parts, "s")
        assert set(parts.changes.held_tokens) == {"s"}
        call: Any = message(prompt_of(40), 2, "s") | {"ends_session": True}
        assert [chunk async for chunk in chunks_of(parts.rounds.generate, call)]
        assert parts.changes.held_tokens == {}


async def test_a_worker_that_comes_back_releases_the_sessions_that_ended(model_folder: Path) -> None:
    store, lab = MemoryStore(), Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        parts = worker_parts("D", engine, lab.times, store=store)
        engine.kv.connect(lab.peers, parts.held)
        await rounds_of(parts, "ended", "lives", "again")
        for session_id in ("ended", "again", "elsewhere"):
            await store.end_session(session_id)
        async with parts.sessions.round("again"):
            await parts.publisher.start()
        assert set(parts.changes.held_tokens) == {"lives", "again"}
        await parts.publisher.retire()
