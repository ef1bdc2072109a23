"""Loads beside a step that still runs: under the overlap schedule it may write into pages that are free already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ampd.tiny_model import make_tiny_model
from tests.harness.engine_hooks import OVERWRITTEN, TAKEN, in_engine_processes, write_late
from tests.harness.forked_engines import DEVICE
from workers.engines.base import EngineRequest

pytest.importorskip("sglang", exc_type=ImportError)
pytest.importorskip("nixl")

from tests.harness.sglang_cells import started
from tests.harness.sglang_pair import GREEDY, PAGE, LocalPeers, empty, idle, pair_settings, rid, run, text
from tests.waiting import until
from workers.engines.sglang import SglangEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(DEVICE == "cuda", reason="streams and events are stand-ins for those of a GPU"),
]

TRIES = 6
"""A round that is aborted ends at any token. If its last page is full there, the page is not free."""


@dataclass(frozen=True)
class Late:
    """An engine whose steps write as late as they can, and what it notes."""

    engine: SglangEngine
    notes: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def late(tmp_path_factory: pytest.TempPathFactory, forked: None) -> AsyncIterator[Late]:  # noqa: ARG001
    folder = tmp_path_factory.mktemp("late")
    notes = folder / "notes"
    notes.touch()
    settings = pair_settings(make_tiny_model(folder / "tiny"), disable_overlap_schedule=False, max_running_requests=2)
    async with AsyncExitStack() as stack:
        stack.enter_context(in_engine_processes(write_late, str(notes), PAGE))
        engine = await started(stack, settings)
        engine.kv.connect(LocalPeers(), lambda _session, _tokens: None)
        yield Late(engine, notes)


@pytest.mark.parametrize("end", ["stop token", "abort"])
async def test_a_load_into_a_page_of_a_round_that_has_just_ended_is_not_overwritten(late: Late, end: str) -> None:
    """The round's last step was launched before its end was known, and writes into the page."""
    for number in range(TRIES):
        await empty(late.engine)
        late.notes.write_text("")
        context = text(10 + number, 300)
        alone = await run(late.engine, "s", context, 12)
        await late.engine.kv.store.settle(60.0)
        loaded = await load_when_a_round_ends(late.engine, context, end, number)
        assert loaded.reloaded_tokens == 299 // PAGE * PAGE
        noted = late.notes.read_text().splitlines()
        assert OVERWRITTEN not in noted
        assert loaded.token_ids == alone.token_ids
        if TAKEN in noted:
            return
    pytest.fail(f"in {TRIES} tries no load took a page that a step wrote")


async def load_when_a_round_ends(engine: SglangEngine, context: list[int], end: str, number: int) -> Any:
    """A round whose context comes from the store, and which is admitted when one of two running rounds has ended."""
    prompt = text(30 + number, 40)
    stop = {"stop_token_ids": [await stop_token(engine, prompt)]} if end == "stop token" else {"ignore_eos": True}
    await until(lambda: idle(engine))
    streams = [running(engine, text(50 + number, 50)), running(engine, text(70 + number, 50))]
    for stream in streams:
        await anext(stream)
    waiting: list[asyncio.Task[Any]] = []
    if end == "stop token":  # it is the next that runs, and the load waits for its end
        waiting.append(asyncio.create_task(run(engine, "a", prompt, 500, **GREEDY | {"stop_conditions": stop})))
        await until(lambda: submitted(engine) == 3)
    waiting.append(asyncio.create_task(run(engine, "s", context, 12)))
    await until(lambda: submitted(engine) == 2 + len(waiting))
    await streams[0].aclose()
    *_, loaded = await asyncio.gather(*waiting)
    await streams[1].aclose()
    return loaded


async def stop_token(engine: SglangEngine, prompt: list[int]) -> int:
    """A token that the answer to this prompt has only once, in the middle of a page."""
    answer = (await run(engine, "a", prompt, 60)).token_ids
    return next(
        token
        for at, token in enumerate(answer)
        if at > 20 and answer.index(token) == at and (len(prompt) + at + 1) % PAGE not in (0, PAGE - 1)
    )


def running(engine: SglangEngine, prompt: list[int]) -> Any:
    return engine.generate(EngineRequest(rid(), "b", prompt, 1000, GREEDY))


def submitted(engine: SglangEngine) -> int:
    """Requests that SGLang has got and not yet ended."""
    manager: Any = engine._manager
    return len(manager.rid_to_state)
