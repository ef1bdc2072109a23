"""A worker's parts, connected."""

from __future__ import annotations

from types import SimpleNamespace

from ampd.perf.presets import load_performance_model
from ampd.types import Parallelism
from tests.workers.parts_lab import worker_parts


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
