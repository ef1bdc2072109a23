"""The connection between a worker and the ranks of its engine: order, resets, and what requests may load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.waiting import PATIENCE_S, until
from workers.kv import rank_links
from workers.kv.rank_links import RankLinks
from workers.kv.ranks.link import Offered, RankLink, refuse
from workers.kv.shared import Forgotten, KvGeometry, Offer, Place, Records, ToWorker, Write, Written

KEYS = [bytes([number]) * 32 for number in range(8)]


class Writer:
    """Notes what is copied; `gate` holds copies back."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, list[int], list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.begun = False

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        self.begun = True
        self.gate.wait(PATIENCE_S)
        if self.fails:
            raise OSError("no memory")
        self.copied.append((pool, list(slots), list(offsets)))

    def map(self, number: int, place: Place) -> str:
        self.gate.wait(PATIENCE_S)
        self.mapped = number, place
        return "no such process" if self.fails else ""

    def unmap(self, number: int) -> None:
        self.mapped = -number, self.mapped[1]


GEOMETRY = KvGeometry("", 16, ())


class Side:
    """The worker's end, with what it received, and two ranks."""

    def __init__(self) -> None:
        self.received: list[tuple[int, ToWorker]] = []
        self.links = RankLinks(2, lambda rank, message: self.received.append((rank, message)))
        self.writers = [Writer(), Writer()]
        self.ranks = [
            RankLink(address, rank, GEOMETRY, writer, writer)
            for rank, (address, writer) in enumerate(zip(self.links.addresses, self.writers, strict=True))
        ]

    def of(self, kind: type) -> list[tuple[int, ToWorker]]:
        return [(rank, message) for rank, message in self.received if isinstance(message, kind)]

    def offer(self, *numbers: int) -> None:
        for number in numbers:
            for rank in self.ranks:
                rank.offer(Offered("s", {"kv": KEYS[number]}, partial(dict, kv=[10 + number])))


@asynccontextmanager
async def connected() -> AsyncIterator[Side]:
    side = Side()
    try:
        hellos = await side.links.hellos(PATIENCE_S)
        assert [hello.rank for hello in hellos] == [0, 1]
        yield side
    finally:
        for writer in side.writers:
            writer.gate.set()
        for rank in side.ranks:
            rank.close()
        await side.links.close()


async def test_offers_are_copied_and_completed_in_their_order() -> None:
    async with connected() as side:
        side.offer(0, 1, 2)
        await until(lambda: len(side.of(Offer)) == 3)
        assert [rank for rank, _ in side.of(Offer)] == [0, 0, 0]
        side.links.send(Write(2, {"kv": ([0], [200])}))
        side.links.send(Write(1, None))
        assert not side.of(Written)
        side.links.send(Write(0, {"kv": ([0], [100])}))
        await until(lambda: len(side.of(Written)) == 4)
        for rank, writer in zip(side.ranks, side.writers, strict=True):
            assert writer.copied == [("kv", [10], [100]), ("kv", [12], [200])]
            assert list(rank.completed) == [True, False, True]
        digests: dict[int, set[bytes]] = {message.number: set() for _, message in side.of(Written)}
        for _, message in side.of(Written):
            digests[message.number].add(message.digest)
        assert all(len(found) == 1 and b"" not in found for found in digests.values())
        assert digests[0] != digests[2]


async def test_a_rank_that_has_not_been_offered_yet_waits_for_its_own_offer() -> None:
    async with connected() as side:
        side.ranks[0].offer(Offered("s", {"kv": KEYS[0]}, lambda: {"kv": [10]}))
        side.links.send(Write(0, {"kv": ([0], [100])}))
        await until(lambda: side.of(Written))
        assert [rank for rank, _ in side.of(Written)] == [0]
        side.ranks[1].offer(Offered("s", {"kv": KEYS[0]}, lambda: {"kv": [10]}))
        await until(lambda: len(side.of(Written)) == 2)


async def test_a_copy_that_fails_is_reported_and_completes_as_on_the_other_rank() -> None:
    async with connected() as side:
        side.writers[1].fails = True
        side.offer(0)
        side.links.send(Write(0, {"kv": ([0], [100])}))
        await until(lambda: len(side.of(Written)) == 2)
        assert {message.digest == b"" for rank, message in side.of(Written) if rank == 1} == {True}
        assert [list(rank.completed) for rank in side.ranks] == [[True], [True]]


async def test_a_rank_answers_while_it_copies() -> None:
    """Every request with stored KV waits for this answer, and a long copy takes as long as a pass."""
    async with connected() as side:
        for writer in side.writers:
            writer.gate.clear()
        side.offer(0)
        side.links.send(Write(0, {"kv": ([0], [100])}))
        await until(lambda: all(writer.begun for writer in side.writers))
        await side.links.allow("r", {"kv": Records(KEYS[0], [5])})
        assert await side.links.offers() == 1
        await side.links.drop("r")
        assert not side.of(Written)
        for writer in side.writers:
            writer.gate.set()
        await until(lambda: len(side.of(Written)) == 2)


async def test_a_reset_waits_for_the_running_copy_and_forgets_the_rest() -> None:
    async with connected() as side:
        for writer in side.writers:
            writer.gate.clear()
        side.offer(0, 1)
        side.links.send(Write(0, {"kv": ([0], [100])}))
        side.links.send(Write(1, {"kv": ([0], [200])}))
        await asyncio.sleep(0)
        resets = [asyncio.create_task(asyncio.to_thread(rank.reset)) for rank in side.ranks]
        await asyncio.sleep(0.05)
        for writer in side.writers:
            writer.gate.set()
        await asyncio.gather(*resets)
        copied = [list(writer.copied) for writer in side.writers]
        await until(lambda: len(side.of(Forgotten)) == 2)
        assert {message.below for _, message in side.of(Forgotten)} == {2}
        side.offer(2)
        side.links.send(Write(2, {"kv": ([0], [300])}))
        await until(lambda: all(writer.copied != before for writer, before in zip(side.writers, copied, strict=True)))
        for rank, writer in zip(side.ranks, side.writers, strict=True):
            assert writer.copied[-1] == ("kv", [12], [300])
            assert list(rank.completed) == [True]


async def test_what_a_request_may_load_is_dropped_only_when_its_load_has_ended() -> None:
    async with connected() as side:
        await side.links.allow("r", {"kv": Records(KEYS[0] + KEYS[1], [5, 6])})
        for rank in side.ranks:
            assert rank.loadable("r").records == {"kv": {KEYS[0].hex(): 5, KEYS[1].hex(): 6}}
        side.ranks[1].begin_load("r")
        drop = asyncio.create_task(side.links.drop("r"))
        await until(lambda: not side.ranks[1].loadable("r").records)
        await asyncio.sleep(0.05)
        assert not drop.done()
        side.ranks[1].end_load("r")
        await asyncio.wait_for(drop, PATIENCE_S)


async def test_a_rank_that_has_gone_ends_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_links, "CALL_TIMEOUT_S", 0.2)
    async with connected() as side:
        side.ranks[1].close()
        side.ranks[1].close = lambda: None
        with pytest.raises((ConnectionError, TimeoutError)):
            await side.links.allow("r", {})


async def test_a_drop_waits_for_a_slow_rank_until_the_engine_is_given_up() -> None:
    async with connected() as side:
        side.ranks[1].begin_load("r")
        drop = asyncio.create_task(side.links.drop("r"))
        await until(lambda: "r" in side.ranks[1]._loadable._calls)
        await side.links.close()
        with pytest.raises(ConnectionError, match="gone"):
            await drop


async def test_what_a_load_reads_is_replaced_when_it_has_ended() -> None:
    async with connected() as side:
        await side.links.allow("r", {"kv": Records(KEYS[0], [5])}, 9.5)
        side.ranks[1].begin_load("r")
        assert side.ranks[1].loadable("r").until_s == 9.5
        instead = asyncio.create_task(side.links.allow("r", {"kv": Records(KEYS[0], [6])}))
        await until(lambda: side.ranks[1].loadable("r").records == {"kv": {KEYS[0].hex(): 6}})
        await asyncio.sleep(0.05)
        assert not instead.done()
        side.ranks[1].end_load("r")
        await instead


async def test_a_rank_answers_while_it_maps_the_store_of_a_neighbour() -> None:
    place = (1, 2, 3, 4)
    async with connected() as side:
        side.writers[1].gate.clear()
        mapping = asyncio.create_task(side.links.map(7, place))
        await side.links.allow("r", {})
        assert not mapping.done()
        side.writers[1].gate.set()
        assert await mapping == ""
        assert [writer.mapped for writer in side.writers] == [(7, place)] * 2
        side.links.unmap(7)
        await until(lambda: [writer.mapped[0] for writer in side.writers] == [-7, -7])
        side.writers[1].fails = True
        assert await side.links.map(8, place) == "no such process"


async def test_a_rank_that_refuses_its_kv_leaves_the_reason() -> None:
    links = RankLinks(2, lambda _rank, _message: None)
    try:
        assert links.refusal == ""
        await asyncio.to_thread(refuse, links.addresses[1], 1, "no such pool")
        await until(lambda: links.refusal)
        assert links.refusal == "no such pool"
    finally:
        await links.close()


async def test_a_rank_sends_its_warnings_with_its_first_message() -> None:
    links = RankLinks(1, lambda _rank, _message: None)
    rank = RankLink(links.addresses[0], 0, GEOMETRY, Writer(), Writer(), ["slow memory"])
    try:
        (hello,) = await links.hellos(10.0)
        assert hello.warnings == ["slow memory"]
    finally:
        rank.close()
        await links.close()
