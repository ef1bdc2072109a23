"""The store of one worker with the ranks of its engine: offers, loads, checksums, and the end of an engine."""

from __future__ import annotations

import asyncio

import pytest

from ampd.keys import page_keys
from ampd.types import Factors

pytest.importorskip("nixl")
pytest.importorskip("msgspec")

from tests.waiting import until
from tests.workers.kv.exchange_lab import PAGE, Worker, text, workers
from tests.workers.kv.store.store_lab import forget_all
from workers.kv import engine_store
from workers.kv.rank_links import RankLinks
from workers.kv.shared import Forgotten


async def test_the_last_messages_of_an_engine_do_not_reach_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a rank says that its first 500 offers are over. The next engine counts its offers from 0."""
    async with workers(a=(a := Worker())):
        store = a.exchange.store
        for rank in a.ranks:
            rank.close()
        close = RankLinks.close

        async def close_late(links: RankLinks) -> None:
            store._receive(1, Forgotten(500))
            await close(links)

        with monkeypatch.context() as patch:
            patch.setattr(RankLinks, "close", close_late)
            await store.replace_engine()
        a.start_ranks()
        await a.exchange.open(10.0)
        tokens = text(1, 4)
        assert await a.compute("s", tokens) == page_keys(tokens, PAGE, tenant="")
        assert a.held["s"] == 4 * PAGE


async def test_rank_0_tells_of_passes() -> None:
    told: list[tuple[str, int, bool]] = []
    async with workers(a=(a := Worker())):
        a.exchange.store.on_passes = told.extend
        for rank in reversed(a.ranks):
            rank.link.tell_passes([("r", 700, False), ("s", 9, True)])
        await until(lambda: bool(told))
        await a.exchange.store.settle(10.0)
    assert told == [("r", 700, False), ("s", 9, True)], "once, although the engine has two ranks"


async def test_rank_0_tells_of_the_times_of_passes() -> None:
    told: list[Factors] = []
    async with workers(a=(a := Worker())):
        a.exchange.store.on_factors = told.append
        a.ranks[0].link.tell_factors(Factors(step=1.5))
        await until(lambda: bool(told))
    assert told == [Factors(step=1.5)]


async def test_what_does_not_pay_is_not_loaded_and_not_protected() -> None:
    async with workers(a=(a := Worker(pages=8))):
        store = a.exchange.store
        keys = await a.compute("s", text(1, 6))
        assert await store.begin_request("r", "s", keys, pays=lambda tokens: tokens < 6 * PAGE) == 0
        store.end_request("r", "s", keys)
        await a.exchange.release_session("s")
        assert not any(rank.link.loadable("r").records for rank in a.ranks)
        others = await a.compute("t", text(2, 8))
        assert store.directory.match(others) == 8


async def test_ranks_that_are_offered_different_pages_keep_nothing() -> None:
    async with workers(a=(a := Worker())):
        keys = page_keys(text(1, 4), PAGE, tenant="")
        await a.exchange.store.begin_request("r", "s", keys)
        a.ranks[0].offer("s", keys)
        a.ranks[1].offer("s", keys[:3])
        await a.exchange.store.settle(10.0)
        assert a.exchange.store.directory.match(keys) == 0
        assert not a.exchange.store.directory.used_bytes


async def test_a_wait_for_pages_ends_with_the_engine() -> None:
    async with workers(a=(a := Worker())):
        keys = page_keys(text(1, 4), PAGE, tenant="")
        await a.exchange.store.begin_request("r", "s", keys)
        # Rank 1 is never offered them, so they never become readable.
        a.ranks[0].offer("s", keys)
        waiting = asyncio.create_task(a.exchange.store.settle(60.0))
        await until(lambda: a.exchange.store.directory.used_bytes)
        while a.ranks:
            a.ranks.pop().close()
        await a.exchange.store.replace_engine()
        with pytest.raises(ConnectionError, match="gone"):
            await waiting
        assert not a.exchange.store.directory.used_bytes


async def test_what_a_lost_engine_was_loading_is_let_go() -> None:
    async with workers(a=(a := Worker())):
        keys = await a.compute("s", text(1, 4))
        await a.exchange.store.begin_request("r", "s", keys)
        a.ranks[1].link.begin_load("r")
        a.exchange.store.end_request("r", "s", keys)
        await until(lambda: not a.ranks[1].link.loadable("r").records)
        while a.ranks:
            a.ranks.pop().close()
        await a.exchange.store.replace_engine()
        await a.exchange.release_session("s")
        forget_all(a.exchange.store.directory)
        assert not a.exchange.store.directory.used_bytes


async def test_what_a_request_may_load_stays_until_the_engine_gives_it_up() -> None:
    async with workers(a=(a := Worker())):
        store, keys = a.exchange.store, await a.compute("s", text(1, 4))
        await store.begin_request("r", "s", keys)
        given_up, asked = asyncio.Event(), asyncio.Event()

        async def until_given_up() -> None:
            asked.set()
            await given_up.wait()

        store.end_request("r", "s", keys, until_given_up)
        await asked.wait()
        store.unprotect("r")
        assert [len(rank.link.loadable("r").records["kv"]) for rank in a.ranks] == [4, 4]
        given_up.set()
        await until(
            lambda: not any(rank.link.loadable("r").records for rank in a.ranks) and not store.directory._requests
        )


async def test_a_load_that_takes_long_keeps_its_records_only_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_store, "_LONG_DROP_S", 0.01)
    async with workers(a=(a := Worker())):
        store, keys = a.exchange.store, await a.compute("s", text(1, 4))
        await store.begin_request("r", "s", keys)
        a.ranks[1].link.begin_load("r")
        store.end_request("r", "s", keys)
        await until(lambda: "has not ended the loads" in caplog.text)
        assert "r" in store.directory._requests
        a.ranks[1].link.end_load("r")
        await until(lambda: not store.directory._requests and not store._known)
