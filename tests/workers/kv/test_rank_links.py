"""Offers of an engine whose ranks send nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ampd.keys import KEY_BYTES
from tests.workers.kv.store.store_lab import forget_all, store_of
from workers.kv.rank_links import Offers
from workers.kv.shared import Offer, Write, Written
from workers.kv.store.directory import Checksums, Reservation


def test_an_offer_that_is_made_twice_is_refused_and_keeps_no_memory() -> None:
    directory, sent = store_of(8), list[Write]()
    offers = Offers(directory, 1, sent.append, lambda: None, lambda _, done: done(None), lambda: 0.0)
    offers.receive(0, Offer(0, "s", {"kv": b"a" * KEY_BYTES}))
    with pytest.raises(ValueError, match="offer 0 is made twice"):
        offers.receive(0, Offer(0, "s", {"kv": b"b" * KEY_BYTES}))
    offers.receive(0, Written(0, b"digest"))
    with pytest.raises(ValueError, match="offer 0 is made twice"):
        offers.receive(0, Offer(0, "s", {"kv": b"a" * KEY_BYTES}))
    offers.abandon()
    forget_all(directory)
    assert directory.used_bytes == 0
    assert len(sent) == 1


KEY = b"a" * KEY_BYTES


class Late:
    """Checksums that are made when the test says so."""

    def __init__(self) -> None:
        self.done: list[Callable[[Checksums], None]] = []

    def sum_up(self, _reservation: Reservation, done: Callable[[Checksums], None]) -> None:
        self.done.append(done)


async def test_pages_are_there_when_their_checksums_are() -> None:
    directory, late = store_of(8), Late()
    offers = Offers(directory, 1, lambda _: None, lambda: None, late.sum_up, lambda: 0.0)
    offers.receive(0, Offer(0, "s", {"kv": KEY}))
    offers.receive(0, Written(0, b"digest"))
    settled = asyncio.ensure_future(offers.settled(1))
    await asyncio.sleep(0)
    assert (directory.match([KEY]), settled.done()) == (0, False)
    late.done[0]({"kv": [7]})
    await settled
    assert directory.lease([KEY], 1.0, 0.0).checksums == {"kv": [7]}


def test_pages_of_an_engine_that_has_gone_are_given_up_although_their_checksums_come() -> None:
    directory, late = store_of(8), Late()
    offers = Offers(directory, 1, lambda _: None, lambda: None, late.sum_up, lambda: 0.0)
    offers.receive(0, Offer(0, "s", {"kv": KEY}))
    offers.receive(0, Written(0, b"digest"))
    offers.abandon()
    late.done[0]({"kv": [7]})
    assert directory.match([KEY]) == 0
    assert directory.used_bytes == 0
