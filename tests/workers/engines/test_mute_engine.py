"""An engine that computes and does not answer hangs. One that computes a long prefill does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.page_keys import page_keys
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from tests.workers.engines.modelled_lab import Times, prompt_of
from workers.engines.base import EngineInfo, EngineOutput, EngineRequest
from workers.engines.supervised import STALL_FLOOR_S, SupervisedEngine

PAGE, TURNS = 16, 10
CHUNK_S = STALL_FLOOR_S / 4
MOST_CHUNKS = 12


class Scripted:
    """An engine of which a test says when it stores KV and when it answers."""

    info = EngineInfo(Parallelism(), 10**6, 10**6, PAGE, 1)

    def __init__(self) -> None:
        self.kv = self
        self.activity = 0
        self.outputs: dict[str, asyncio.Queue[EngineOutput]] = {}
        self._stored: set[bytes] = set()

    async def serve(self, request: KvRequest) -> KvReply:
        keys = request["keys"]
        return KvReply(matched=next((at for at, key in enumerate(keys) if key not in self._stored), len(keys)))

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        outputs = self.outputs[request.rid] = asyncio.Queue()
        while True:
            yield await outputs.get()

    def store(self, prompt: list[int], pages: int = 10**6) -> None:
        """The first pages of a prompt were computed."""
        self._stored.update(page_keys(prompt, PAGE, tenant="")[:pages])
        self.activity += 1


class Bench:
    """A supervised engine under a clock of its own, and the calls that wait for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.engine = Scripted()
        engine: Any = self.engine
        self._watched = SupervisedEngine(engine, Times(), lambda: self.now_s)
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def begin(self, pages: int) -> tuple[str, list[int]]:
        """A request whose prompt has this many full pages, and no page in common with another one."""
        rid, prompt = f"{len(self._calls):032x}", prompt_of(pages * PAGE + 3, len(self._calls))
        prompt[0] = len(self._calls) + 1000

        async def consume() -> None:
            async for _ in self._watched.generate(EngineRequest(rid, "s", prompt, 100)):
                pass

        self._calls[rid] = asyncio.create_task(consume())
        await self._settle()
        return rid, prompt

    async def answer(self, rid: str) -> None:
        self.engine.outputs[rid].put_nowait(EngineOutput([1]))
        await self._settle()

    async def leave(self, rid: str) -> None:
        """The client gives up."""
        self._calls[rid].cancel()
        await self._settle()

    async def hangs_after(self, seconds: float) -> bool:
        """Whether the engine counts as hung at a check after this time."""
        self.now_s += seconds
        await self._watched._note_prefills()
        return self._watched._standstill() is not None

    async def end(self) -> None:
        for call in self._calls.values():
            call.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def _settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


@pytest.mark.parametrize("leaves", [False, True], ids=["clients wait", "clients give up"])
@pytest.mark.parametrize("chunks", [1, 2, MOST_CHUNKS])
async def test_prefills_of_others_do_not_hide_that_no_output_comes(chunks: int, leaves: bool) -> None:
    """What a detokenizer that stands still looks like under steady load. Each prefill has the given chunks."""
    bench = Bench()
    decoding, _ = await bench.begin(1)
    await bench.answer(decoding)
    silent_s = complete_s = bench.now_s
    while True:
        rid, prompt = await bench.begin(chunks)
        hangs = await bench.hangs_after(CHUNK_S)
        for chunk in range(1, chunks + 1):
            bench.engine.store(prompt, chunk)
            hangs = hangs or await bench.hangs_after(CHUNK_S)
        if complete_s == silent_s:
            complete_s = bench.now_s
        if hangs:
            break
        assert bench.now_s - complete_s <= STALL_FLOOR_S + (chunks + 1) * CHUNK_S, "nobody notices"
        if leaves:
            await bench.leave(rid)
    await bench.end()


@pytest.mark.parametrize("what", ["KV that peers bring or that ended requests leave", "nothing"])
async def test_kv_of_no_waiting_prompt_is_no_progress(what: str) -> None:
    """On a decode worker requests that end go on storing their answers, which nobody gets."""
    bench = Bench()
    rid, prompt = await bench.begin(3)
    bench.engine.store(prompt)  # by a prefill worker
    await bench.answer(rid)
    _, other = await bench.begin(3)
    bench.engine.store(other)
    checks = int(STALL_FLOOR_S / CHUNK_S)
    for number in range(checks):
        if what != "nothing":
            bench.engine.store(prompt_of(5 * PAGE, 10_000 + number))
        assert not await bench.hangs_after(CHUNK_S)
    assert await bench.hangs_after(CHUNK_S)
    await bench.end()


async def test_a_request_whose_context_is_stored_may_wait_behind_a_long_prefill() -> None:
    """Its KV is complete from the start, so that it does not show that the engine has computed it."""
    bench = Bench()
    long, long_prompt = await bench.begin(MOST_CHUNKS)
    queued, context = await bench.begin(4)
    bench.engine.store(context)
    for chunk in range(1, MOST_CHUNKS + 1):
        assert not await bench.hangs_after(CHUNK_S)
        bench.engine.store(long_prompt, chunk)
    assert not await bench.hangs_after(CHUNK_S)
    await bench.answer(long)
    await bench.answer(queued)
    await bench.end()


@given(
    st.lists(st.tuples(st.integers(1, MOST_CHUNKS), st.integers(0, 3)), min_size=1, max_size=6),
    st.floats(0.01, 0.45),
)
@settings(deadline=None, max_examples=60)
def test_an_engine_that_answers_each_prefill_never_hangs(plan: list[tuple[int, int]], chunk_share: float) -> None:
    """Requests come in any number while others are computed chunk by chunk, each one answered when it is complete."""

    async def serve() -> None:
        bench = Bench()
        waiting = [(await bench.begin(pages), pages, more) for pages, more in plan]
        for (rid, prompt), pages, more in waiting:
            for chunk in range(1, pages + 1):
                assert not await bench.hangs_after(chunk_share * STALL_FLOOR_S)
                bench.engine.store(prompt, chunk)
                assert not await bench.hangs_after(0.0)
            for _ in range(more):
                await bench.begin(2)  # waits to the end
            await bench.answer(rid)
        await bench.end()

    asyncio.run(serve())
