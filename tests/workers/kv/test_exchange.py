"""Stores of two workers, with ranks that write and real NIXL between them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ampd.keys import page_keys
from ampd.wire import KvRequest

pytest.importorskip("nixl")
pytest.importorskip("msgspec")

from tests.waiting import until
from tests.workers.kv.exchange_lab import PAGE, PAGES, RECORD, Worker, record_of, text, workers
from workers.kv import engine_store


async def test_a_context_is_read_from_the_worker_that_computed_it() -> None:
    async with workers(a=Worker(ranks=2), b=(b := Worker(ranks=1))) as peers:
        tokens = text(1, 10)
        keys = await peers.workers["a"].compute("s", tokens)
        fetched = await b.read("r", tokens, "a", 60.0)
        assert fetched.error is None
        assert (fetched.tokens, fetched.bytes) == (10 * PAGE, 10 * RECORD)
        assert b.stored(keys) == [record_of(key) for key in keys]
        again = await b.read("r2", tokens, "a", 60.0)
        assert (again.tokens, again.bytes, again.error) == (0, 0, None)


async def test_only_what_is_missing_is_read_and_what_is_not_there_is_not() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())):
        tokens = text(1, 12)
        await b.compute("s", tokens[: 4 * PAGE])
        await a.compute("s", tokens[: 9 * PAGE])
        fetched = await b.read("r", tokens, "a", 60.0)
        assert fetched.bytes == 5 * RECORD
        keys = page_keys(tokens, PAGE, tenant="")
        assert b.stored(keys) == [record_of(key) for key in keys[:9]]


async def test_another_kind_of_kv_is_refused() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker(fingerprint="other"))):
        tokens = text(1, 4)
        await a.compute("s", tokens)
        fetched = await b.read("r", tokens, "a", 60.0)
        assert fetched.tokens == 0
        assert fetched.error is not None
        assert "weights or settings differ" in fetched.error
        assert not b.exchange.store.directory.used_bytes


async def test_a_lease_that_ends_during_the_read_makes_it_void() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())) as peers:
        tokens = text(1, 4)
        await a.compute("s", tokens)

        async def late(request: KvRequest) -> None:
            if request["op"] == "unlease":
                a.exchange.store.directory.collect(1e12)

        peers.before = late
        fetched = await b.read("r", tokens, "a", 60.0)
        assert fetched.tokens == 0
        assert fetched.error is not None
        assert "ended the lease" in fetched.error
        assert not b.exchange.store.directory.used_bytes


async def test_without_a_match_no_descriptor_is_given_away() -> None:
    async with workers(a=(a := Worker())):
        keys = await a.compute("s", text(1, 4))
        reply = await a.exchange.serve({"op": "lease", "keys": [b"guess"], "ttl_s": 5.0})
        assert reply == {"lease_id": "", "matched": 0}
        assert (await a.exchange.serve({"op": "lease", "keys": keys, "ttl_s": 5.0}))["descriptor"]


@pytest.mark.parametrize("ttl_s", [-1.0, 0.0, float("nan"), "5", None])
async def test_a_lease_without_sense_is_an_error(ttl_s: Any) -> None:
    async with workers(a=(a := Worker())):
        keys = await a.compute("s", text(1, 4))
        assert "error" in await a.exchange.serve({"op": "lease", "keys": keys, "ttl_s": ttl_s})
        assert not a.exchange.store.directory._leases


@pytest.mark.parametrize("op", ["lease", "unlease"])
async def test_a_worker_that_does_not_answer_costs_the_timeout_and_no_memory(op: str) -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())) as peers:
        tokens = text(1, 4)
        await a.compute("s", tokens)

        async def silent(request: KvRequest) -> None:
            if request["op"] == op:
                await asyncio.sleep(3600)

        peers.before = silent
        fetched = await b.read("r", tokens, "a", 0.3)
        assert fetched.tokens == 0
        assert fetched.error is not None
        # The time may be over while the transport still writes. Memory is free only after that.
        await until(lambda: not b.exchange.store.directory.used_bytes)
        peers.before = None


async def test_a_worker_with_another_kind_of_kv_is_not_read() -> None:
    async with workers(a=(a := Worker(fingerprint="other")), b=(b := Worker())) as peers:
        asked = []

        async def note(request: KvRequest) -> None:
            asked.append(request["op"])

        peers.before = note
        await a.compute("s", text(1, 4))
        assert "another kind of KV" in str((await b.read("r", text(1, 4), "a", 60.0)).error)
        await until(lambda: not a.exchange.store.directory._leases)
        assert asked == ["lease", "unlease"]


@pytest.mark.parametrize(
    "answer",
    [
        {"records": {"kv": ([0, 1, 2, 99], [0, 64, 128, 192])}},
        {"records": {"kv": ([0], [-64])}},
        {"records": {"kv": ([0], [PAGES * RECORD])}},
        {"records": {"else": ([0], [0])}},
        {"descriptor": b"nonsense"},
    ],
)
async def test_an_answer_without_sense_is_an_error(answer: dict[str, Any]) -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())):
        tokens = text(1, 4)
        await a.compute("s", tokens)
        serve = a.exchange.serve

        async def wrong(request: KvRequest) -> Any:
            reply = await serve(request)
            return {**reply, **answer} if request["op"] == "lease" else reply

        a.exchange.serve = wrong
        fetched = await b.read("r", tokens, "a", 60.0)
        assert fetched.tokens == 0
        assert fetched.error is not None
        assert not b.exchange.store.directory.used_bytes
        await until(lambda: not a.exchange.store.directory._leases)


async def test_a_store_that_is_full_of_running_sessions_refuses_and_frees() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker(pages=8))):
        first, second = text(1, 8), text(2, 4)
        keys = await b.compute("running", first)
        await b.exchange.store.begin_request("r-running", "running", keys)
        await a.compute("s", second)
        fetched = await b.read("r", second, "a", 60.0)
        assert fetched.error is not None
        assert "no room" in fetched.error
        b.exchange.store.end_request("r-running", "running", keys)
        await b.exchange.release_session("running")

        async def is_read() -> bool:
            return (await b.read("r", second, "a", 60.0)).tokens == 4 * PAGE

        await until(is_read)  # the pages become free only when the load of the request has ended


async def test_a_session_that_was_released_is_read_again() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())):
        tokens = text(1, 4)
        await a.compute("s", tokens)
        await b.exchange.release_session("s")
        assert (await b.read("r", tokens, "a", 60.0)).tokens == 4 * PAGE
        await b.exchange.store.begin_request("r", "s", page_keys(tokens, PAGE, tenant=""))
        assert b.held["s"] == 4 * PAGE


async def test_the_store_outlives_its_engine() -> None:
    async with workers(a=(a := Worker()), b=(b := Worker())):
        tokens = text(1, 6)
        keys = await a.compute("s", tokens)
        for rank in a.ranks:
            rank.close()
        await a.exchange.store.replace_engine()
        a.start_ranks()
        await a.exchange.open(10.0)
        assert await a.exchange.store.begin_request("r1", "s", keys) == 6 * PAGE
        assert [len(rank.link.loadable("r1").records["kv"]) for rank in a.ranks] == [6, 6]
        assert (await b.read("r", tokens, "a", 60.0)).tokens == 6 * PAGE


async def test_sessions_report_what_they_hold() -> None:
    async with workers(a=(a := Worker())):
        await a.compute("s", text(1, 5))
        assert a.held["s"] == 5 * PAGE
        assert await a.exchange.release_session("s") == 5 * PAGE
        assert a.held["s"] == 0


@pytest.mark.parametrize(("has_checksums", "at_once_bytes"), [(True, 1 << 30), (True, 1), (False, 1)])
async def test_a_record_that_changed_after_it_was_written_is_not_taken(
    has_checksums: bool, at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_store, "_AT_ONCE_BYTES", at_once_bytes)
    a, b = Worker(has_checksums=has_checksums), Worker(has_checksums=has_checksums)
    async with workers(a=a, b=b):
        tokens = text(1, 4)
        keys = await a.compute("s", tokens)
        loadable = a.exchange.store.protect("look", keys)
        a.exchange.store.memory.map[loadable.records["kv"].offsets[2]] ^= 1
        fetched = await b.read("r", tokens, "a", 60.0)
        if has_checksums:
            assert fetched.tokens == 0
            assert "other checksums" in str(fetched.error)
            assert not b.exchange.store.directory.used_bytes
        else:
            assert b.stored(keys) != [record_of(key) for key in keys]


async def test_a_lease_waits_for_the_engine_only_if_pages_are_missing() -> None:
    async with workers(a=(a := Worker())):
        first, second = (page_keys(text(seed, 4), PAGE, tenant="") for seed in (1, 2))
        await a.compute("s", text(1, 4))
        await a.exchange.store.begin_request("r", "t", second)
        a.ranks[0].offer("t", second)  # never settles: rank 1 is not offered them
        await until(lambda: decided_offers(a) > 1)
        leases = {}
        for name, keys in (("first", first), ("second", second)):
            request = KvRequest(op="lease", keys=keys, ttl_s=60.0)
            leases[name] = asyncio.create_task(a.exchange.serve(request))
        assert (await leases["first"])["matched"] == 4
        assert not leases["second"].done()
        a.ranks[1].offer("t", second)
        assert (await leases["second"])["matched"] == 4


async def test_a_read_of_a_history_does_not_wait_for_the_engine_of_its_owner() -> None:
    """Its prompt goes on behind the history, and the owner has nothing of that."""
    async with workers(a=(a := Worker()), b=(b := Worker())):
        keys, _ = await stored_and_unsettled(a)
        prompt = [*text(1, 8)[: 8 * PAGE], *text(3, 2)]
        asked = page_keys(prompt, PAGE, tenant="")
        settle = a.exchange.store.settle

        async def never(_timeout_s: float) -> None:
            raise AssertionError("the engine was asked")

        a.exchange.store.settle = never
        fetched = await b.exchange.fetch("r", asked, b.exchange.protect("r", asked), "a", 60.0, len(keys) * PAGE)
        assert (fetched.tokens, fetched.error) == (len(keys) * PAGE, None)
        a.exchange.store.settle = settle


def decided_offers(worker: Worker) -> int:
    offers = worker.exchange.store._offers
    assert offers is not None
    return offers.decided


async def stored_and_unsettled(worker: Worker) -> tuple[list[bytes], list[bytes]]:
    """(keys of pages in the store, keys of pages that never settle, because rank 1 is not offered them)."""
    keys = await worker.compute("s", text(1, 8))
    others = page_keys(text(2, 4), PAGE, tenant="")
    await worker.exchange.store.begin_request("r", "t", others)
    worker.ranks[0].offer("t", others)
    await until(lambda: decided_offers(worker) > 1)
    return keys, others


@pytest.mark.slow
async def test_a_lease_gives_what_is_there_if_the_engine_does_not_settle() -> None:
    async with workers(a=(a := Worker())):
        keys, others = await stored_and_unsettled(a)
        longer = [*keys, *others]
        reply = await a.exchange.serve(KvRequest(op="lease", keys=longer, ttl_s=1.0))
        assert reply.get("error") is None
        assert reply["matched"] == len(keys)


async def test_a_count_that_need_not_wait_does_not_wait_for_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with workers(a=(a := Worker())):
        keys, _ = await stored_and_unsettled(a)
        assert await a.exchange.held_tokens("s", waits=False) == len(keys) * PAGE
        assert not [record for record in caplog.records if record.levelname == "WARNING"]  # the end of a wait is one


async def test_a_store_without_an_engine_gives_kv_away_as_another_host_does() -> None:
    async with workers(a=(a := Worker(host="host"))) as peers:
        other = a.exchange.without_engine(10 * PAGE)
        peers.workers["other"] = SimpleNamespace(exchange=other)
        transport: Any = a.exchange._transport
        transport.read = Mock(wraps=transport.read)
        assert other.store.place[1] == 11 * RECORD
        for number in range(1, 4):
            tokens = text(number, 10)
            await other.store.put(page_keys(tokens, PAGE, tenant=""))
            fetched = await a.read("r", tokens, "other", 60.0)
            assert (fetched.tokens, fetched.bytes, fetched.error) == (10 * PAGE, 10 * RECORD, None)
            assert transport.read.call_count == number  # it was not mapped, although it is on this host
        await other.close()


async def test_what_was_put_into_a_store_is_loaded() -> None:
    async with workers(a=(a := Worker())):
        keys = page_keys(text(1, 10), PAGE, tenant="")
        await a.exchange.store.put(keys)
        assert await a.exchange.store.begin_request("r", "s", keys) == 10 * PAGE
        assert len(a.ranks[0].link.loadable("r").records["kv"]) == 10
