"""Records of neighbours are loaded where they lie, and copied meanwhile: same bytes, leases, and the way over NIXL."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl")
pytest.importorskip("msgspec")

from tests.waiting import until
from tests.workers.kv.exchange_lab import PAGE, RECORD, Worker, record_of, text, workers
from workers.kv import neighbours as product
from workers.kv.engine_store import EngineStore
from workers.kv.peer_reads import decode_descriptor
from workers.kv.shared import NEIGHBOUR_BYTES, StoreMemory, this_host

HOST = "host"


def neighbour(**options: Any) -> Worker:
    return Worker(host=HOST, **options)


def hold_copies(worker: Worker) -> asyncio.Event:
    """Copies out of a neighbour's store begin only after the event."""
    may_begin = asyncio.Event()
    store = worker.exchange.store
    copy = store.copy

    def held(*blocks: Any) -> tuple[Future[int], Callable[[], None]]:
        done: Future[int] = Future()

        async def begin() -> None:
            await may_begin.wait()
            begun, _ = copy(*blocks)
            begun.add_done_callback(lambda ended: done.set_result(ended.result()))

        tasks.append(asyncio.ensure_future(begin()))
        return done, lambda: None

    tasks: list[asyncio.Future[None]] = []
    store.copy = held
    return may_begin


def refuse_nixl(worker: Worker) -> None:
    transport: Any = worker.exchange._transport

    def read(*_: Any) -> None:
        raise AssertionError("it was read over NIXL")

    transport.read = read


def loaded(worker: Worker, rid: str) -> list[bytes]:
    """What the ranks of a worker load for a request, as whole records."""
    parts = [[rank.read(offset) for offset in rank.link.loadable(rid).records["kv"].values()] for rank in worker.ranks]
    return [b"".join(part) for part in zip(*parts, strict=True)]


def is_foreign(worker: Worker, rid: str) -> bool:
    return any(
        offset >= NEIGHBOUR_BYTES for rank in worker.ranks for offset in rank.link.loadable(rid).records["kv"].values()
    )


async def test_a_request_loads_from_the_neighbours_store_before_its_records_are_here() -> None:
    async with workers(a=(a := neighbour()), b=(b := neighbour())):
        refuse_nixl(b)
        may_copy, tokens = hold_copies(b), text(1, 10)
        keys = await a.compute("s", tokens)
        fetched = await b.read("r", tokens, "a", 60.0)
        assert (fetched.tokens, fetched.bytes, fetched.error) == (10 * PAGE, 10 * RECORD, None)
        store = b.exchange.store
        assert await store.begin_request("r", "s", keys) == 10 * PAGE
        assert is_foreign(b, "r")
        assert loaded(b, "r") == [record_of(key) for key in keys]
        assert b.stored(keys) != [record_of(key) for key in keys]
        assert len(a.exchange.store.directory._leases) == 1
        # A load runs while the records come: until it has ended, the neighbour protects them.
        b.ranks[1].link.begin_load("r")
        may_copy.set()
        await until(lambda: not is_foreign(b, "r"))
        assert b.stored(keys) == loaded(b, "r") == [record_of(key) for key in keys]
        assert len(a.exchange.store.directory._leases) == 1
        b.ranks[1].link.end_load("r")
        await until(lambda: not a.exchange.store.directory._leases)
        assert all(rank.link.loadable("r").until_s == float("inf") for rank in b.ranks)
        store.end_request("r", "s", keys)
        await until(lambda: not store.directory._requests)


async def test_a_request_that_ends_before_its_records_are_here_leaves_them_to_the_next() -> None:
    async with workers(a=(a := neighbour()), b=(b := neighbour())):
        may_copy, tokens = hold_copies(b), text(1, 4)
        keys = await a.compute("s", tokens)
        await b.read("r", tokens, "a", 60.0)
        store = b.exchange.store
        await store.begin_request("r", "s", keys)
        store.end_request("r", "s", keys)
        await until(lambda: not store.directory._requests)
        await store.begin_request("r2", "s", keys)
        assert is_foreign(b, "r2")
        may_copy.set()
        await until(lambda: not is_foreign(b, "r2") and not a.exchange.store.directory._leases)
        assert loaded(b, "r2") == [record_of(key) for key in keys]
        assert not any(rank.link.loadable("r").records for rank in b.ranks)


async def test_what_is_lent_is_leased_only_when_it_is_here() -> None:
    async with workers(a=(a := neighbour()), b=(b := neighbour()), c=(c := Worker())):
        may_copy, tokens = hold_copies(b), text(1, 4)
        keys = await a.compute("s", tokens)
        await b.read("r", tokens, "a", 60.0)
        read = asyncio.create_task(c.read("r", tokens, "b", 60.0))
        await until(lambda: bool(b.exchange.store.directory._leases))
        await asyncio.sleep(0.05)
        assert not read.done()
        may_copy.set()
        assert (await read).error is None
        assert c.stored(keys) == [record_of(key) for key in keys]


async def test_a_copy_that_outlasts_the_lease_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kv.peer_reads._LEASE_MARGIN_S", 0.1)
    async with workers(a=(a := neighbour()), b=(b := neighbour())):
        may_copy, tokens = hold_copies(b), text(1, 4)
        keys = await a.compute("s", tokens)
        assert (await b.read("r", tokens, "a", 0.3)).error is None
        store = b.exchange.store
        assert await store.begin_request("r", "s", keys) == 4 * PAGE
        # A rank fails a load that ends later than this.
        assert all(rank.link.loadable("r").until_s < time.monotonic() + 0.4 for rank in b.ranks)
        await until(lambda: not store._lent)
        assert store.directory.match(keys) == 0
        assert b.held["s"] == 0 or store.directory.sessions.held_tokens("s") == 0
        assert store.directory.used_bytes == 4 * RECORD  # the copy may still write there
        may_copy.set()
        store.end_request("r", "s", keys)
        await until(lambda: not store.directory.used_bytes)


async def test_a_neighbour_that_dies_is_read_to_the_end() -> None:
    """The memory is there until its last mapping ends, and the dead write nothing."""
    async with workers(b=(b := neighbour())) as peers:
        await (a := neighbour()).start(peers, "a")
        may_copy, tokens = hold_copies(b), text(1, 4)
        keys = await a.compute("s", tokens)
        await b.read("r", tokens, "a", 60.0)
        await b.exchange.store.begin_request("r", "s", keys)
        await a.close()
        may_copy.set()
        await until(lambda: not is_foreign(b, "r"))
        assert b.stored(keys) == loaded(b, "r") == [record_of(key) for key in keys]


OWNER = """
import sys
from workers.kv.shared import StoreMemory
memory = StoreMemory.create(1 << 20)
memory.map[:4] = b"left"
print(*memory.place_for_neighbours, flush=True)
sys.stdin.read()
"""


async def test_the_mapping_of_a_process_ends_with_it() -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, stdin=PIPE, stdout=PIPE)
    assert owner.stdout is not None
    place: Any = tuple(map(int, (await owner.stdout.readline()).split()))
    async with workers(b=(b := neighbour())):
        maps = b.exchange.store._neighbours
        first = await maps.first_offset("a", place)
        assert first is not None
        found, at = maps.at(first)
        assert bytes(found[at : at + 4]) == b"left"
        assert all(rank.neighbours for rank in b.ranks)
        await owner.communicate(b"")
        await until(lambda: not any(rank.neighbours for rank in b.ranks))
        assert not maps._by_place
        assert bytes(found[at : at + 4]) == b"left"
        with pytest.raises(ConnectionError, match="gone"):
            maps.at(first)


async def test_a_store_that_cannot_be_mapped_is_read_over_nixl(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(a=(a := neighbour()), b=(b := neighbour())):
        monkeypatch.setattr(b.ranks[1], "map", lambda *_: "the driver refuses it")
        contexts = [text(1, 4), text(2, 4)]
        for session, tokens in zip("st", contexts, strict=True):
            keys = await a.compute(session, tokens)
            with caplog.at_level(logging.WARNING):
                assert (await b.read(session, tokens, "a", 60.0)).error is None
            assert b.stored(keys) == [record_of(key) for key in keys]
        lines = [record.message for record in caplog.records if "goes over NIXL" in record.message]
        assert lines == ["KV of worker a goes over NIXL, although it is on this host: the driver refuses it"]
        await until(lambda: not any(rank.neighbours for rank in b.ranks))


async def test_a_mapping_that_takes_long_holds_up_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_MAP_S", 0.0)
    async with workers(a=(a := neighbour()), b=(b := neighbour())):
        tokens = text(1, 4)
        keys = await a.compute("s", tokens)
        assert (await b.read("r", tokens, "a", 60.0)).error is None
        assert b.stored(keys) == [record_of(key) for key in keys]
        await until(lambda: all(of.bytes is not None for of in b.exchange.store._neighbours._by_place.values()))
        refuse_nixl(b)
        await a.compute("t", text(2, 4))
        assert (await b.read("r2", text(2, 4), "a", 60.0)).error is None


@pytest.mark.parametrize("hosts", [("", HOST), (HOST, ""), (HOST, "other")])
async def test_workers_of_other_hosts_read_over_nixl(hosts: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    async with workers(a=(a := Worker(host=hosts[0])), b=(b := Worker(host=hosts[1]))):
        tokens = text(1, 4)
        keys = await a.compute("s", tokens)
        with caplog.at_level(logging.WARNING):
            assert (await b.read("r", tokens, "a", 60.0)).error is None
        assert not b.exchange.store._neighbours._by_place
        assert b.stored(keys) == [record_of(key) for key in keys]
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_another_kind_of_kv_is_refused_on_one_host_too() -> None:
    async with workers(a=(a := neighbour(fingerprint="other")), b=(b := neighbour())):
        tokens = text(1, 4)
        await a.compute("s", tokens)
        assert "weights or settings differ" in str((await b.read("r", tokens, "a", 60.0)).error)
        assert not b.exchange.store.directory.used_bytes


async def test_a_record_that_has_changed_is_found_before_it_is_loaded() -> None:
    async with workers(a=(a := neighbour()), b=(b := neighbour())):
        tokens = text(1, 4)
        keys = await a.compute("s", tokens)
        offsets = a.exchange.store.protect("look", keys).records["kv"].offsets
        a.exchange.store.memory.map[offsets[2]] ^= 1
        assert "other checksums" in str((await b.read("r", tokens, "a", 60.0)).error)
        assert not b.exchange.store.directory.used_bytes
        await until(lambda: not a.exchange.store.directory._leases)


def test_a_store_of_another_user_or_file_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = StoreMemory.create(1 << 20)
    process, fd, file, size = memory.place_for_neighbours
    assert StoreMemory.of_neighbour(process, fd, file, size).map[:4] == bytes(4)
    with pytest.raises(ValueError, match="another KV store"):
        StoreMemory.of_neighbour(process, fd, file + 1, size)
    with pytest.raises(ValueError, match="no KV store"), Path(os.devnull).open() as other:
        StoreMemory.of_neighbour(process, other.fileno(), file, size)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="another user"):
        StoreMemory.of_neighbour(process, fd, file, size)
    memory.close()


def test_a_neighbour_cannot_write_and_the_owner_cannot_shrink() -> None:
    memory = StoreMemory.create(1 << 20)
    mapped = StoreMemory.of_neighbour(*memory.place_for_neighbours)
    with pytest.raises(TypeError, match="read"):
        mapped.map[0] = 1
    with pytest.raises(PermissionError):
        os.ftruncate(memory._fd, 0)
    mapped.close()
    memory.close()


def test_users_and_containers_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_host()
    assert here == this_host()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert this_host() != here


async def test_the_descriptor_names_the_host_only_where_stores_are_shared() -> None:
    async with workers(a=(a := Worker()), b=(b := neighbour())):
        for worker, host in ((a, ""), (b, HOST)):
            keys = await worker.compute("s", text(1, 2))
            reply = await worker.exchange.serve({"op": "lease", "keys": keys, "ttl_s": 5.0})
            descriptor = decode_descriptor(reply["descriptor"])
            assert (descriptor.host, descriptor.place is not None) == (host, bool(host))
    assert isinstance(b.exchange.store, EngineStore)
