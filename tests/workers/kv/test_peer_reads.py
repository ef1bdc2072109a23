"""Reads of one worker at the same time, over real NIXL; workers from which no KV can be read."""

from __future__ import annotations

import asyncio
import time

import pytest

from ampd.keys import page_keys
from ampd.wire import KvRequest

pytest.importorskip("nixl")
pytest.importorskip("msgspec")

from tests.waiting import until
from tests.workers.kv.exchange_lab import PAGE, RECORD, Peers, Worker, record_of, text, workers
from workers.kv.nixl_transport import NixlTransport


def hold_up_the_first_end(peers: Peers) -> tuple[asyncio.Event, list[KvRequest]]:
    """The first read cannot end its lease before the event. The list has all ends that were asked for."""
    may_end = asyncio.Event()
    ending: list[KvRequest] = []

    async def hold_up(request: KvRequest) -> None:
        if request["op"] == "unlease":
            ending.append(request)
            if len(ending) == 1:
                await may_end.wait()

    peers.before = hold_up
    return may_end, ending


async def test_a_read_waits_for_the_records_that_another_read_brings() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())) as peers:
        shared = text(1, 8)[: 8 * PAGE]
        prompts = [shared + text(seed, 2) for seed in (2, 3)]
        for name, prompt in zip("st", prompts, strict=True):
            await a.compute(name, prompt)
        may_end, ending = hold_up_the_first_end(peers)
        first = asyncio.create_task(b.read("r", prompts[0], "a", 60.0))
        await until(lambda: len(ending) == 1)
        second = asyncio.create_task(b.read("r2", prompts[1], "a", 60.0))
        await until(lambda: len(ending) == 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not second.done()
        may_end.set()
        assert [(await read).bytes for read in (first, second)] == [10 * RECORD, 2 * RECORD]
        keys = page_keys(prompts[1], PAGE, tenant="")
        assert b.exchange.protect("r2", keys) == 10 * PAGE
        assert b.stored(keys) == [record_of(key) for key in keys]


async def test_what_another_read_fails_to_bring_is_read_again() -> None:
    """The client of the first round goes away while a second round waits for the pages that both share."""
    async with workers(a=(a := Worker()), b=(b := Worker())) as peers:
        shared = text(1, 8)[: 8 * PAGE]
        prompts = [shared + text(seed, 2) for seed in (2, 3, 4)]
        for name, prompt in zip("stu", prompts, strict=True):
            await a.compute(name, prompt)
        _, ending = hold_up_the_first_end(peers)
        first = asyncio.create_task(b.read("r", prompts[0], "a", 60.0))
        await until(lambda: len(ending) == 1)
        waiting = [asyncio.create_task(b.read(f"r{at}", prompts[at], "a", 60.0)) for at in (1, 2)]
        await until(lambda: len(ending) == 3)
        first.cancel()
        fetched = [await read for read in waiting]
        assert [each.error for each in fetched] == [None, None]
        assert sorted(each.bytes for each in fetched) == [2 * RECORD, 10 * RECORD]
        for at in (1, 2):
            keys = page_keys(prompts[at], PAGE, tenant="")
            assert b.exchange.protect(f"r{at}", keys) == 10 * PAGE
            assert b.stored(keys) == [record_of(key) for key in keys]


async def test_a_read_protects_what_another_read_has_brought() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())) as peers:
        prompt = text(1, 4)
        await a.compute("s", prompt)
        may_end, ending = asyncio.Event(), asyncio.Event()

        async def hold_up(request: KvRequest) -> None:
            if request["op"] == "unlease":
                ending.set()
                await may_end.wait()

        peers.before = hold_up
        first = asyncio.create_task(b.read("r", prompt, "a", 60.0))
        await ending.wait()
        second = asyncio.create_task(b.read("r2", prompt, "a", 60.0))
        may_end.set()
        fetched = [await read for read in (first, second)]
        assert [(each.tokens, each.bytes) for each in fetched] == [(4 * PAGE, 4 * RECORD), (4 * PAGE, 0)]
        await b.exchange.unprotect("r")
        directory = b.exchange.store.directory
        assert directory.evicted_tokens.total() == 0
        assert directory.used_tokens == 4 * PAGE
        assert "r2" in directory._requests


async def test_what_a_read_brought_stays_while_it_waits_for_another_read() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker(pages=14))) as peers:
        shared = text(1, 8)[: 8 * PAGE]
        prompts = [shared + text(seed, 2) for seed in (2, 3)]
        for name, prompt in zip("st", prompts, strict=True):
            await a.compute(name, prompt)
        may_end, ending = hold_up_the_first_end(peers)
        first = asyncio.create_task(b.read("r", prompts[0], "a", 60.0))
        await until(lambda: len(ending) == 1)
        second = asyncio.create_task(b.read("r2", prompts[1], "a", 60.0))
        await until(lambda: "r2" in b.exchange.store.directory._requests)
        await b.compute("u", text(4, 4))  # its pages find no room
        may_end.set()
        assert [(await read).error for read in (first, second)] == [None, None]
        assert b.exchange.protect("r2", page_keys(prompts[1], PAGE, tenant="")) == 10 * PAGE


async def test_what_is_computed_while_a_late_read_goes_on_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is given up after a while, and its bytes come much later: meanwhile nothing drives its source."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with workers(a=(a := Worker()), b=(b := Worker())):
        tokens = text(1, 4)
        await a.compute("s", tokens)
        transports = [worker.exchange._transport for worker in (a, b)]
        assert all(isinstance(transport, NixlTransport) for transport in transports)
        let_read = transports[0].let_read
        transports[0].let_read = lambda _until_s: None
        assert "within" in str((await b.read("r", tokens, "a", 0.2)).error)
        keys = await b.compute("s", tokens)
        assert b.held["s"] == 4 * PAGE
        let_read(time.monotonic() + 60.0)
        await until(lambda: not transports[1]._active)
        await until(lambda: b.exchange.store.directory.used_bytes == 4 * RECORD)
        assert b.stored(keys) == [record_of(key) for key in keys]


async def test_what_was_read_behind_a_hole_is_let_go_with_its_request() -> None:
    async with workers(b=(b := Worker())):
        store, keys = b.exchange.store, page_keys(text(1, 4), PAGE, tenant="")
        reservation = store.directory.reserve("", {"kv": keys[1:]}, 0.0)
        assert reservation is not None
        store.directory.written(reservation.id, rid="r")
        assert await store.begin_request("r", "s", keys) == 0
        assert store.directory._requests
        store.end_request("r", "s", keys)
        assert not store.directory._requests
