"""The exchange with real NIXL and its keeper, on pools of plain memory: no engine."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ampd.page_keys import page_keys
from ampd.telemetry import tracing
from ampd.wire import KvReply, KvRequest

pytest.importorskip("nixl")

from tests.workers.kv.staging_lab import staging_free_tokens
from workers.kv.layout import Descriptor, PoolLayout
from workers.kv.nixl_exchange import NixlExchange
from workers.kv.nixl_transport import NixlReader
from workers.kv.pinkeeper import Offload, PinKeeper
from workers.kv.staging_area import PageReader

PAGE = 4
POOL_PAGES = 64
STAGING_PAGES = 24
WIDTHS = (96, 96, 96, 96)


class HeldBackReader:
    """Never finishes by itself: reads end when the test says so."""

    def __init__(self, staging: PoolLayout) -> None:
        self.staging = staging
        self.reads: list[tuple[Future[int], list[int]]] = []
        self.abandoned = 0

    def read(
        self, _peer: str, _descriptor: Descriptor, _sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[Future[int], Callable[[], None]]:
        done: Future[int] = Future()
        self.reads.append((done, list(targets)))

        def abandon() -> None:
            self.abandoned += 1

        return done, abandon

    def close(self) -> None: ...


@dataclass
class Worker:
    """One worker without an engine: a pool of bytes, its keeper, its exchange."""

    exchange: NixlExchange
    keeper: PinKeeper
    pool: mmap.mmap
    held: dict[str, int]
    offered: int = 0

    def fill(self, session: str, tokens: Sequence[int], first_page: int, skip: int = 0) -> None:
        """Pretend to have prefilled: each page's bytes name the page."""
        keys = page_keys(tokens, PAGE)[skip:]
        pages = list(range(first_page, first_page + len(keys)))
        for buffer, width in enumerate(WIDTHS):
            for page in pages:
                at = (buffer * POOL_PAGES + page) * width
                self.pool[at : at + width] = bytes([buffer + 1, page]) * (width // 2)
        self.offered += 1
        self.keeper.offload(Offload(self.offered, session, keys, lambda: pages))

    def staged(self, rid: str, tokens: Sequence[int]) -> list[bytes]:
        """The bytes that wait in staging for a request: K of the first layer, page by page."""
        names = [key.hex() for key in page_keys(tokens, PAGE)]
        count = self.keeper.staged(rid, names)
        pages = self.keeper.begin_load(rid, names[:count]) or []
        self.keeper.end_load(rid)
        return [self.keeper.staging.map[page * WIDTHS[0] : (page + 1) * WIDTHS[0]] for page in pages]


class Peers:
    """`KvPeers` within the test."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.before: Callable[[KvRequest], Any] = lambda _request: None
        self.seen: list[str] = []

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        self.seen.append(request["op"])
        await asyncio.sleep(0)
        wait = self.before(request)
        if wait is not None:
            await wait
        return await asyncio.wait_for(self.workers[worker_id].exchange.serve(request), timeout_s)


@contextmanager
def keeper_for(exchange: NixlExchange, budget_pages: int) -> Iterator[tuple[PinKeeper, mmap.mmap]]:
    size = sum(WIDTHS) * POOL_PAGES
    pool = mmap.mmap(-1, size)
    base = addressof(c_char.from_buffer(pool))
    addresses = tuple(base + at * WIDTHS[0] * POOL_PAGES for at in range(len(WIDTHS)))
    layout = PoolLayout("bytes", PAGE, POOL_PAGES, WIDTHS, addresses)
    keeper = PinKeeper(layout, [(base, size)], exchange.address, budget_pages * PAGE, STAGING_PAGES, lambda: None)
    try:
        yield keeper, pool
    finally:
        keeper.close()


Made = tuple[Worker, Worker, Peers]


@pytest.fixture
async def workers() -> AsyncIterator[Made]:
    async for made in make_workers(NixlReader):
        yield made


@pytest.fixture
async def held_back() -> AsyncIterator[Made]:
    async for made in make_workers(HeldBackReader):
        yield made


async def make_workers(make_reader: Callable[[PoolLayout], PageReader]) -> AsyncIterator[Made]:
    exchanges = [NixlExchange(make_reader) for _ in range(2)]
    peers = Peers()
    with keeper_for(exchanges[0], 40) as source, keeper_for(exchanges[1], 40) as target:
        for name, exchange, (keeper, pool) in zip("SR", exchanges, (source, target), strict=True):
            await exchange.open(10.0)
            worker = peers.workers[name] = Worker(exchange, keeper, pool, {})
            exchange.connect(peers, worker.held.__setitem__)
        try:
            yield peers.workers["S"], peers.workers["R"], peers
        finally:
            for exchange in exchanges:
                await exchange.close()


def context(pages: int, first: int = 0) -> list[int]:
    return [first, *range(1, pages * PAGE + 1)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_fetch_moves_the_bytes_of_the_missing_pages(workers: Made) -> None:
    source, reader, peers = workers
    tokens = context(10)
    source.fill("s", tokens, first_page=20)
    fetched = await reader.exchange.fetch("r1", "s", tokens, "S", 5.0)
    assert (fetched.tokens, fetched.error) == (10 * PAGE, None)
    assert fetched.bytes == 10 * sum(WIDTHS)
    assert reader.staged("r1", tokens) == [bytes([1, page]) * (WIDTHS[0] // 2) for page in range(20, 30)]
    assert reader.staged("another request", tokens) == []
    await reader.exchange.discard("r1")
    assert reader.staged("r1", tokens) == []
    assert staging_free_tokens(reader.exchange) == STAGING_PAGES * PAGE
    assert peers.seen == ["lease", "unlease"]


@pytest.mark.parametrize(
    "changed",
    [
        {"pages": None},
        {"pages": ["a"]},
        {"pages": [-1]},
        {"pages": list(range(40))},
        {"pages": 7},
        {"descriptor": None},
        {"descriptor": b""},
        {"descriptor": b"\xff" * 80},
        {"descriptor": (100_000).to_bytes(4, "little") + b"[" * 100_000},
        {"lease_id": 7, "pages": []},
        {"error": ["nested"]},
        None,
        ["lease_id"],
        7,
    ],
    ids=str,
)
async def test_a_malformed_answer_is_an_error_and_no_exception(
    held_back: Made, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    source, reader, peers = held_back
    tokens = context(10)
    source.fill("s", tokens, first_page=20)
    ask = peers.call

    async def malformed(worker_id: str, request: KvRequest, timeout_s: float) -> Any:
        if request["op"] != "lease" or not isinstance(changed, dict):
            return changed
        return {**await ask(worker_id, request, timeout_s), **changed}

    monkeypatch.setattr(peers, "call", malformed)
    fetched = await reader.exchange.fetch("r1", "s", tokens, "S", 5.0)
    assert fetched.tokens == 0
    assert isinstance(fetched.error, str)
    assert staging_free_tokens(reader.exchange) == STAGING_PAGES * PAGE


async def test_what_is_here_is_not_read(workers: Made) -> None:
    source, reader, peers = workers
    tokens = context(10)
    source.fill("s", tokens, first_page=20)
    reader.fill("s", tokens[: 6 * PAGE], first_page=3)
    fetched = await reader.exchange.fetch("r1", "s", tokens, "S", 5.0)
    assert fetched.tokens == 4 * PAGE
    again = await reader.exchange.fetch("r2", "s", tokens[: 5 * PAGE], "S", 5.0)
    assert (again.tokens, again.error) == (0, None)
    assert peers.seen == ["lease", "unlease"]
    await reader.exchange.discard("r1")


async def test_a_lease_that_ended_spoils_the_read(workers: Made) -> None:
    source, reader, peers = workers
    tokens = context(10)
    source.fill("s", tokens, first_page=20)

    def forget(request: KvRequest) -> None:
        if request["op"] == "unlease":
            source.keeper.reset()

    peers.before = forget
    fetched = await reader.exchange.fetch("r1", "s", tokens, "S", 5.0)
    assert fetched.tokens == 0
    assert fetched.error is not None
    assert "ended the lease" in fetched.error
    assert reader.staged("r1", tokens) == []
    assert staging_free_tokens(reader.exchange) == STAGING_PAGES * PAGE


async def test_pages_of_a_read_that_timed_out_stay_out_of_use(held_back: Made) -> None:
    source, target, _peers = held_back
    reader: Any = target.exchange.staging._reader
    tokens = context(10)
    source.fill("s", tokens, first_page=20)
    fetched = await target.exchange.fetch("r1", "s", tokens, "S", 0.2)
    assert fetched.tokens == 0
    assert "within 0.2 s" in str(fetched.error)
    assert reader.abandoned == 1
    assert staging_free_tokens(target.exchange) == (STAGING_PAGES - 10) * PAGE
    # Another fetch gets other pages while the first may still write to its own.
    other = asyncio.create_task(target.exchange.fetch("r2", "s", tokens, "S", 5.0))
    await until(lambda: len(reader.reads) == 2)
    assert not set(reader.reads[0][1]) & set(reader.reads[1][1])
    reader.reads[1][0].set_result(1)
    assert (await other).tokens == 10 * PAGE
    reader.reads[0][0].set_exception(ConnectionError("late"))
    await until(lambda: staging_free_tokens(target.exchange) == (STAGING_PAGES - 10) * PAGE)
    await target.exchange.discard("r2")
    assert staging_free_tokens(target.exchange) == STAGING_PAGES * PAGE
    # The leases were given back: nothing keeps the pages at the source once the session goes.
    await source.exchange.release_session("s")
    await until(lambda: list(source.keeper.released) == [1])


async def test_a_cancelled_fetch_leaves_nothing(held_back: Made) -> None:
    source, target, _peers = held_back
    reader: Any = target.exchange.staging._reader
    tokens = context(10)
    source.fill("s", tokens, first_page=20)
    fetch = asyncio.create_task(target.exchange.fetch("r1", "s", tokens, "S", 60.0))
    await until(lambda: reader.reads)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    reader.reads[0][0].set_result(1)
    await until(lambda: staging_free_tokens(target.exchange) == STAGING_PAGES * PAGE)
    await source.exchange.release_session("s")
    await until(lambda: list(source.keeper.released) == [1])


async def test_staged_pages_stay_while_the_engine_copies_them(workers: Made) -> None:
    source, reader, _peers = workers
    tokens = context(10)
    source.fill("s", tokens, first_page=20)
    await reader.exchange.fetch("r1", "s", tokens, "S", 5.0)
    names = [key.hex() for key in page_keys(tokens, PAGE)]
    assert reader.keeper.begin_load("r1", names) is not None
    discard = asyncio.create_task(reader.exchange.discard("r1"))
    await asyncio.sleep(0.1)
    assert not discard.done()
    assert staging_free_tokens(reader.exchange) < STAGING_PAGES * PAGE
    assert reader.keeper.begin_load("r1", names) is None
    reader.keeper.end_load("r1")
    await discard
    assert staging_free_tokens(reader.exchange) == STAGING_PAGES * PAGE


async def test_a_release_waits_for_the_readers_lease(workers: Made) -> None:
    source, _reader, peers = workers
    tokens = context(5)
    source.fill("s", tokens, first_page=20)
    reply = await peers.call("S", KvRequest(op="lease", keys=page_keys(tokens, PAGE), ttl_s=0.3), 5.0)
    assert reply["pages"] == list(range(20, 25))
    assert await source.exchange.release_session("s") == 0
    assert not source.keeper.released
    await until(lambda: list(source.keeper.released) == [1])
    late = await peers.call("S", KvRequest(op="unlease", lease_id=reply["lease_id"]), 5.0)
    assert late.get("error") == "the lease had ended"


async def test_held_tokens_are_told_as_they_change(workers: Made) -> None:
    source, _reader, _peers = workers
    source.fill("s", context(10), first_page=0)
    await until(lambda: source.held.get("s") == 10 * PAGE)
    assert await source.exchange.held_tokens("s") == 10 * PAGE
    assert source.exchange.pinned_tokens == 10 * PAGE
    source.fill("t", context(35, first=9), first_page=12)
    await until(lambda: source.held.get("s") == 0)
    assert list(source.keeper.released) == [1]
    assert source.held["t"] == 35 * PAGE


async def test_a_restarted_peer_is_met_anew(workers: Made) -> None:
    source, reader, peers = workers
    tokens = context(6)
    source.fill("s", tokens, first_page=20)
    assert (await reader.exchange.fetch("r1", "s", tokens, "S", 5.0)).tokens == 6 * PAGE
    await reader.exchange.discard("r1")
    restarted = NixlExchange(NixlReader)
    with keeper_for(restarted, 40) as (keeper, pool):
        await restarted.open(10.0)
        again = peers.workers["S"] = Worker(restarted, keeper, pool, {})
        restarted.connect(peers, again.held.__setitem__)
        again.fill("s", tokens, first_page=40)
        assert (await reader.exchange.fetch("r2", "s", tokens, "S", 5.0)).tokens == 6 * PAGE
        assert reader.staged("r2", tokens)[0] == bytes([1, 40]) * (WIDTHS[0] // 2)
        await restarted.close()
    peers.workers["S"] = source
    await reader.exchange.discard("r2")


async def test_unknown_operations_are_refused(workers: Made) -> None:
    reply = await workers[0].exchange.serve(KvRequest(op="format"))
    assert "unknown operation" in reply["error"]


async def test_a_silent_engine_is_an_answer_too(workers: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _reader, _peers = workers
    call = source.exchange._control.call

    async def impatient(message: Any, keys: Sequence[bytes] = (), **_: Any) -> Any:
        return await call({**message, "op": "nonsense"}, keys)

    monkeypatch.setattr(source.exchange._control, "call", impatient)
    assert "error" in await source.exchange.serve(KvRequest(op="match", keys=[]))
    assert await source.exchange.release_session("s") == 0


async def test_the_channel_leaves_no_file() -> None:
    exchange = NixlExchange(NixlReader)
    folder = Path(exchange.address.removeprefix("ipc://")).parent
    assert folder.is_dir()
    with keeper_for(exchange, 40):
        await exchange.open(10.0)
        assert not folder.exists()
        await exchange.close()


async def test_an_engine_that_never_comes_is_a_timeout() -> None:
    exchange = NixlExchange(NixlReader)
    folder = Path(exchange.address.removeprefix("ipc://")).parent
    with pytest.raises(TimeoutError):
        await exchange.open(0.1)
    await exchange.close()
    assert not folder.exists()


async def test_calls_to_peers_are_made_for_the_round_that_reads(held_back: Made) -> None:
    source, reader, peers = held_back
    asked: list[tuple[str, str]] = []

    def note(request: KvRequest) -> None:
        trace = tracing.current()
        asked.append((request["op"], trace.request_id if trace else "nobody"))

    peers.before = note

    async def read(name: str, tokens: list[int], timeout_s: float) -> None:
        tracing.Trace(name).enter()
        await reader.exchange.fetch(f"rid-{name}", name, tokens, "S", timeout_s)

    contexts = {name: [number] * 9 for number, name in enumerate("ab")}
    for at, (name, tokens) in enumerate(contexts.items()):
        source.fill(name, tokens, first_page=4 * at)
    # The reads never end, so each lease is given back by a task of its own, after the read was given up.
    async with asyncio.TaskGroup() as group:
        for name, tokens in contexts.items():
            group.create_task(read(name, tokens, 0.2))
    async with asyncio.timeout(10):
        while len(asked) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert sorted(asked) == [("lease", "a"), ("lease", "b"), ("unlease", "a"), ("unlease", "b")]
    assert tracing.current() is None
