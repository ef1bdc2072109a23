"""Two real engines in one process, wired to each other as two workers are, and what tests do with them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from ampd.keys import page_keys
from ampd.wire import KvReply, KvRequest
from tests.harness.forked_engines import DEVICE
from tests.waiting import until
from tests.workers.kv.store.store_lab import forget_all, session_ids
from workers.engines.base import EngineOutput, EngineRequest
from workers.engines.sglang import SglangEngine, SglangSettings
from workers.engines.sglang_settings import Device
from workers.kv.exchange import KvFetch
from workers.kv.nixl_transport import NixlTransport
from workers.kv.peer_reads import Remote
from workers.kv.store.directory import StoreDirectory

PAGE = 16
POOL_TOKENS = 8000
STORE_GIB = 0.25
TIMEOUT_S = 120.0


def pair_settings(model: Path, tp: int = 1, **arguments: Any) -> SglangSettings:
    """What each engine of the pair runs, with further SGLang engine arguments."""
    return SglangSettings(
        model=model,
        dtype=os.environ.get("AMPD_TEST_DTYPE", "float32"),
        device=Device(DEVICE),
        engine_args=json.dumps(arguments | json.loads(os.environ.get("AMPD_TEST_ENGINE_ARGS", "{}"))),
        max_total_tokens=POOL_TOKENS,
        kv_store_gib=STORE_GIB,
        tp=tp,
    )


class SwitchedTransport(NixlTransport):
    """The real transport, and for the negative control one that reports records as read without moving a byte."""

    moves = True

    def read(
        self, remote: Remote, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
    ) -> tuple[Future[int], Callable[[], None]]:
        if self.moves:
            return super().read(remote, theirs, ours)
        done: Future[int] = Future()
        done.set_result(1)
        return done, lambda: None


class LocalPeers:
    """`KvPeers` within one process; `before` may fail a call or delay it."""

    def __init__(self) -> None:
        self.workers: dict[str, SglangEngine] = {}
        self.before: Callable[[str, KvRequest], Any] | None = None

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        if self.before is not None:
            await self.before(worker_id, request)
        return await asyncio.wait_for(self.workers[worker_id].kv.serve(request), timeout_s)


@dataclass
class Pair:
    """A prefill and a decode worker's engines; `held` is what each told of its sessions."""

    prefill: SglangEngine
    decode: SglangEngine
    peers: LocalPeers
    held: dict[str, dict[str, int]] = field(default_factory=lambda: {"P": {}, "D": {}})

    def connect(self) -> None:
        self.peers.workers = {"P": self.prefill, "D": self.decode}
        for name, engine in self.peers.workers.items():
            engine.kv.connect(self.peers, self.held[name].__setitem__)

    @property
    def engines(self) -> tuple[SglangEngine, ...]:
        """All engines whose stores have a part in the rounds, each once."""
        return self.prefill, self.decode

    async def pass_on(self, context: list[int]) -> None:
        """What happens with a context's KV before the other side reads it: it stays where it is."""


@dataclass
class RelayedPair(Pair):
    """One engine that plays both sides, one after the other. Between them another worker's store has the KV.

    Attributes:
        relay: the other worker. Its engine computes nothing.
    """

    relay: SglangEngine = field(kw_only=True)

    def connect(self) -> None:
        self.peers.workers = {"P": self.relay, "D": self.relay, "itself": self.prefill}
        for engine in self.engines:
            engine.kv.connect(self.peers, self.held["P"].__setitem__)

    @property
    def engines(self) -> tuple[SglangEngine, ...]:
        return self.prefill, self.relay

    async def pass_on(self, context: list[int]) -> None:
        """The relay reads the context, and the engine forgets everything."""
        request = rid()
        assert (await read(self.relay, request, context, "itself", TIMEOUT_S)).error is None
        await self.relay.kv.unprotect(request)
        await empty(self.prefill)


@dataclass
class Round:
    """What one round gave: tokens, and the engine's own counts on each side that worked on it."""

    tokens: list[int]
    decode: EngineOutput
    prefill: EngineOutput | None = None
    to_prefill: KvFetch | None = None
    to_decode: KvFetch | None = None


async def empty(*engines: SglangEngine) -> None:
    """Leave the engines without cache, and their stores without records."""
    for engine in engines:
        await until(lambda engine=engine: idle(engine), TIMEOUT_S)
        await engine.kv.store.settle(TIMEOUT_S)
        directory = engine.kv.store.directory
        for session in session_ids(directory):
            await engine.kv.release_session(session)
        forget_all(directory)
        await until(lambda directory=directory: is_empty(directory), TIMEOUT_S)


def is_empty(directory: StoreDirectory) -> bool:
    """Whether the store is empty. Leases that were not given back end by time, so it is asked again."""
    directory.collect(time.monotonic())
    return not directory.used_bytes


async def idle(engine: SglangEngine) -> bool:
    """Nothing runs in SGLang any more, so that its cache can be emptied; it is empty then."""
    manager: Any = engine._manager
    return bool((await manager.flush_cache()).success)


@contextmanager
def zeroed(engine: SglangEngine, pool: str, context: list[int]) -> Iterator[None]:
    """All records of a pool that the store has of a context are zero meanwhile, and no checksum shows it."""
    store = engine.kv.store
    size = next(each.record_bytes for each in store.geometry.pools if each.name == pool)
    held = store.protect("zeroed", page_keys(context, engine.info.page_size_tokens, tenant=""))
    offsets = held.records[pool].offsets
    assert offsets
    intact = [store.memory.map[offset : offset + size] for offset in offsets]
    for offset in offsets:
        store.memory.map[offset : offset + size] = bytes(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_has_checksums", False)
        yield
        for offset, record in zip(offsets, intact, strict=True):
            store.memory.map[offset : offset + size] = record
    store.directory.unprotect("zeroed")


class LoneWorker:
    """A worker whose engine runs only while it is needed. Other workers can read its store at any time."""

    def __init__(self, settings: SglangSettings, peers: LocalPeers, name: str) -> None:
        self._engine = SglangEngine(settings, SwitchedTransport)
        self._peers = peers
        self._name = name

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[SglangEngine]:
        """The engine, started over what the store has of earlier times."""
        if self._name in self._peers.workers:
            await self._engine.restart()
        else:
            await self._engine.start()
            self._peers.workers[self._name] = self._engine
            self._engine.kv.connect(self._peers, lambda _session, _tokens: None)
        yield self._engine
        await self._engine.kv.store.settle(TIMEOUT_S)
        await self._engine._end_processes(grace_s=0.0)
        await self._engine.kv.store.replace_engine()

    async def stop(self) -> None:
        await self._engine.stop()


def rid() -> str:
    return uuid4().hex


def text(seed: int, length: int) -> list[int]:
    """Random plain tokens."""
    rng = random.Random(seed)
    return [rng.randrange(10, 600) for _ in range(length)]


async def run(
    engine: SglangEngine,
    session: str,
    tokens: list[int],
    new: int,
    request_id: str = "",
    *,
    tenant: str = "",
    **request: Any,
) -> EngineOutput:
    """One request to its end, as one output. SGLang waits for ever for a process that has ended; this fails."""
    call = EngineRequest(request_id or rid(), session, tokens, new, request or GREEDY, tenant=tenant)
    whole = asyncio.ensure_future(_whole(engine, call))
    processes = getattr(engine, "_sglang", None)  # a supervised engine has none, and fails by itself
    ends: set[asyncio.Future[Any]] = {whole} if processes is None else {whole, processes.lost}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert whole.done(), f"{processes.lost.result()}; it has written the reason"
        return whole.result()
    finally:
        whole.cancel()
        await asyncio.wait({whole})


async def _whole(engine: SglangEngine, call: EngineRequest) -> EngineOutput:
    whole = EngineOutput([])
    async with aclosing(cast(Any, engine.generate(call))) as stream:
        async for part in stream:
            part.token_ids = whole.token_ids + part.token_ids
            if part.log_probs is not None:
                part.log_probs = (whole.log_probs or []) + part.log_probs
            whole = part
    return whole


async def read(
    engine: SglangEngine, request_id: str, prompt: list[int], source: str, timeout_s: float, tenant: str = ""
) -> KvFetch:
    """Read what an engine lacks of a prompt, as a worker does before it submits the request."""
    keys = page_keys(prompt[:-1], engine.info.page_size_tokens, tenant=tenant)
    return await engine.kv.fetch(request_id, keys, engine.kv.protect(request_id, keys), source, timeout_s)


GREEDY: dict[str, Any] = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"ignore_eos": True}}


STOPPING: dict[str, Any] = {
    "sampling_options": {"temperature": 0.0},
    "stop_conditions": {"stop_token_ids": list(range(0, 1000, 12))},
}
"""Greedy, too. Each token ends the round with a chance of 1 to 12."""


async def local_round(pair: Pair, session: str, prompt: list[int], new: int, **request: Any) -> Round:
    output = await run(pair.decode, session, prompt, new, **request)
    return Round(output.token_ids, output)


async def remote_round(pair: Pair, session: str, prompt: list[int], new: int, **request: Any) -> Round:
    """A round that does not end with its first token."""
    first_rid, second_rid = rid(), rid()
    await pair.pass_on(prompt)
    to_prefill = await read(pair.prefill, first_rid, prompt, "D", TIMEOUT_S)
    first = await run(pair.prefill, session, prompt, 1, first_rid, **request)
    handed = [*prompt, *first.token_ids]
    await pair.pass_on(handed)
    to_decode = await read(pair.decode, second_rid, handed, "P", TIMEOUT_S)
    rest = await run(pair.decode, session, handed, new - 1, second_rid, **request)
    return Round(first.token_ids + rest.token_ids, rest, first, to_prefill, to_decode)


@dataclass(frozen=True)
class Script:
    """A session: what each round adds to the context, and how much it generates."""

    seed: int
    incr_tokens: tuple[int, ...] = (701, 153, 90, 333, 17, 160, 45)
    output_tokens: int = 24

    def extend(self, context: list[int], number: int) -> list[int]:
        return context + text(self.seed * 1000 + number, self.incr_tokens[number])


async def play(
    script: Script, round_of: Callable[[int], Callable[[list[int], int], Any]]
) -> tuple[list[list[int]], list[Round]]:
    """Run a script; returns the tokens of each round and the rounds."""
    context: list[int] = []
    rounds: list[Round] = []
    for number in range(len(script.incr_tokens)):
        prompt = script.extend(context, number)
        rounds.append(await round_of(number)(prompt, script.output_tokens))
        context = prompt + rounds[-1].tokens
    return [served.tokens for served in rounds], rounds
