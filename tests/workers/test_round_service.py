"""A round that begins to decode is published at once, wherever it was prefilled."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import workers.publisher
from tests.memory_store import MemoryStore
from tests.waiting import until
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.parts_lab import worker_parts
from tests.workers.slices_lab import message
from workers.engines.base import EngineError


async def is_decoding(store: MemoryStore) -> bool:
    return [view.decode_batch for view in await store.snapshot()] == [1]


@pytest.mark.parametrize("source", [None, "gone"], ids=["prefilled here", "prefilled elsewhere"])
async def test_a_round_that_begins_to_decode_is_published(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    # Only changes are published, neither samples nor heartbeats.
    monkeypatch.setattr(workers.publisher, "SAMPLE_INTERVAL_S", 60.0)
    store, lab = MemoryStore(), Lab(model_folder, Times(step_s=0.02))
    async with lab.engine("D") as engine:
        parts = worker_parts("D", engine, lab.times, store=store, lease_s=300.0)
        publisher, rounds = parts.publisher, parts.rounds
        await publisher.start()
        call: Any = message(prompt_of(40), 3000, "s", source=source)
        async with aclosing(rounds.generate(call)) as chunks:
            await anext(chunks)
            await until(lambda: is_decoding(store))
            # The report of a round that ends meanwhile counts the rounds that stay.
            short: Any = message(prompt_of(40, seed=2), 4, "short", source=source)
            async with aclosing(rounds.generate(short)) as others:
                report = [chunk async for chunk in others][-1]["ampd"]
            assert report["decode_batch"] == 1
            assert report["decode_context_tokens"] > 40
        await publisher.retire()


@pytest.mark.parametrize("endpoint", ["prefill", "generate"])
async def test_a_request_that_cannot_run_is_not_counted(model_folder: Path, endpoint: str) -> None:
    lab = Lab(model_folder, Times())
    async with lab.engine("D") as engine:
        rounds = worker_parts("D", engine, lab.times).rounds
        known = engine.info.vocabulary_size
        assert known is not None
        foreign: Any = message([5, known], 3, "s")
        with pytest.raises(EngineError, match=f"token id {known} in the prompt") as refusal:
            await anext(getattr(rounds, endpoint)(foreign))
        assert refusal.value.status == 400
        malformed: Any = message(prompt_of(40), 3, "s")
        del malformed["source_worker_id"]
        with pytest.raises(KeyError):
            await anext(getattr(rounds, endpoint)(malformed))
        assert rounds.running == 0
        async with asyncio.timeout(5):
            await rounds.drained()
