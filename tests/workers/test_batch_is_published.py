"""Coordinators hear at once of a round that begins to decode, wherever it was prefilled."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import workers.publisher
from ampd.policies.registry import create
from ampd.serving.sliding_window import SlidingWindow
from ampd.types import Parallelism, Role, WorkerView
from tests.memory_store import MemoryStore
from tests.workers.engines.modelled_lab import Lab, Times, prompt_of
from tests.workers.slices_lab import message
from workers.prefill_queue import AsyncPrefillQueue
from workers.publisher import Publisher
from workers.rounds import Rounds
from workers.sessions import SessionKeeper


@pytest.mark.parametrize("source", [None, "gone"], ids=["prefilled here", "prefilled elsewhere"])
async def test_a_round_that_begins_to_decode_is_published(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    # Only changes are published, neither samples nor heartbeats.
    monkeypatch.setattr(workers.publisher, "_SAMPLE_INTERVAL_S", 60.0)
    store, lab = MemoryStore(), Lab(model_folder, Times(step_s=0.02))
    async with lab.engine("D") as engine:

        def view() -> WorkerView:
            return WorkerView("D", Role.DECODE, decode_batch=engine.load().running_requests)

        publisher = Publisher(store, view, lease_s=300.0, interval_s=0.001)
        await publisher.start()
        queue = AsyncPrefillQueue(create("ordering", "fcfs"), lab.times, Parallelism())
        windows = SlidingWindow(), SlidingWindow()
        rounds = Rounds("D", engine, queue, SessionKeeper(engine.kv, 60.0), publisher, *windows, 5.0)
        call: Any = message(prompt_of(40), 3000, "s", source=source)
        async with aclosing(rounds.generate(call)) as chunks:
            await anext(chunks)
            async with asyncio.timeout(5):
                while [one.decode_batch for one in await store.snapshot()] != [1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            # The last word of a round that ends meanwhile is of those that stay.
            short: Any = message(prompt_of(40, seed=2), 4, "short", source=source)
            async with aclosing(rounds.generate(short)) as others:
                report = [chunk async for chunk in others][-1]["ampd"]
            assert report["decode_batch"] == 1
            assert report["decode_context_tokens"] > 40
        await publisher.retire()
