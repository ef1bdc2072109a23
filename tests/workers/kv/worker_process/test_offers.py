"""Offers of an engine whose ranks send nonsense."""

from __future__ import annotations

import pytest

from ampd.page_keys import KEY_BYTES
from tests.workers.kv.store.store_lab import forget_all, store_of
from workers.kv.rank_messages import Offer, Write
from workers.kv.worker_process.offers import Offers


def test_an_offer_that_is_made_twice_is_refused_and_keeps_no_memory() -> None:
    directory, sent = store_of(8), list[Write]()
    offers = Offers(directory, 1, sent.append, lambda: None, lambda _: None, lambda: 0.0)
    offers.receive(0, Offer(0, "s", {"kv": b"a" * KEY_BYTES}))
    with pytest.raises(ValueError, match="offer 0 is made twice"):
        offers.receive(0, Offer(0, "s", {"kv": b"b" * KEY_BYTES}))
    offers.abandon()
    forget_all(directory)
    assert directory.used_bytes == 0
    assert len(sent) == 1
