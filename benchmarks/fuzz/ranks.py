"""What a worker and the ranks of its engine send to each other: decoded, and applied to the tables of the receiver."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from msgspec import msgpack

from ampd.keys import KEY_BYTES
from benchmarks.fuzz.mutations import changed, changed_bytes
from benchmarks.fuzz.target import Target
from tests.workers.kv.store.store_lab import RECORD, forget_all, store_of
from workers.kv.rank_links import Offers
from workers.kv.ranks.link import LoadableRecords, Offered, OfferQueue
from workers.kv.shared import (
    Allow,
    Done,
    Drop,
    Forgotten,
    Hello,
    KvGeometry,
    Loaded,
    Offer,
    Records,
    Refused,
    Settle,
    ToRank,
    ToWorker,
    Write,
    Written,
    decode_to_rank,
    decode_to_worker,
    encode,
)

_NAMES = [bytes([number]) * KEY_BYTES for number in range(2)]
_KEYS = b"".join(_NAMES)
_SLOTS = (70, 71)
_PAGES = 8
_DAMAGED = 0.3
"""Share of the inputs whose bytes are changed, and not their fields."""

_TO_RANK: tuple[ToRank, ...] = (
    Write(0, {"kv": ([0, 1], [0, RECORD])}),
    Write(0, None),
    Allow(3, "rid", {"kv": Records(_KEYS, [0, RECORD])}),
    Drop(4, "rid"),
    Settle(5),
)
_TO_WORKER: tuple[ToWorker, ...] = (
    Offer(1, "s", {"kv": _KEYS}),
    Written(0, b"d" * 32),
    Forgotten(1),
    Loaded(["rid"], 0.01),
    Done(3, 1),
    Hello(0, KvGeometry("f", 16, ()), ["slow memory"]),
    Refused(0, "no"),
)


class _Slots:
    """A writer that notes from where it is asked to copy."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:  # noqa: ARG002
        self.slots += slots


def targets() -> Iterator[Target]:
    """The receivers at both ends."""
    yield Target("message to a rank", lambda rng: _data(rng, rng.choice(_TO_RANK)), _receive_in_rank, (ValueError,))
    refusals = (ValueError, KeyError)  # after which the worker goes on with the next message
    yield Target("message to the worker", lambda rng: _data(rng, rng.choice(_TO_WORKER)), _receive_in_worker, refusals)


def _data(rng: random.Random, message: ToRank | ToWorker) -> bytes:
    data = encode(message)
    if rng.random() < _DAMAGED:
        return changed_bytes(rng, data)
    try:
        return msgpack.encode(changed(rng, msgpack.decode(data)))
    except (OverflowError, UnicodeEncodeError, RecursionError):  # msgpack has no such value
        return changed_bytes(rng, data)


def _receive_in_rank(data: bytes) -> None:
    message = decode_to_rank(data)
    assert decode_to_rank(encode(message)) == message
    writer, loadable = _Slots(), LoadableRecords()
    queue = OfferQueue(writer)
    queue.add(Offered("s", {"kv": _KEYS}, lambda: {"kv": _SLOTS}))
    match message:
        case Write(number, records):
            queue.decide(message)
            reports = list(queue.write())
            assert [report.number for report in reports] == ([0] if number == 0 and records is not None else [])
            assert list(queue.completed) == ([records is not None] if number == 0 else [])
            assert set(writer.slots) <= set(_SLOTS)
        case Allow(_, rid, records, until_s):
            assert loadable.allow(rid, records, until_s, 0)
            assert loadable.of(rid).records.keys() == records.keys()
            assert loadable.drop(rid, 1)
            assert not loadable.of(rid).records


def _receive_in_worker(data: bytes) -> None:
    message = decode_to_worker(data)
    assert encode(decode_to_worker(encode(message))) == encode(message)
    directory, sent = store_of(_PAGES), list[Write]()
    offers = Offers(directory, 1, sent.append, lambda: None, lambda _, done: done(None), lambda: 0.0)
    offers.receive(0, Offer(0, "s", {"kv": _KEYS}))
    try:
        offers.receive(0, message)
    finally:
        for write in sent:
            for indices, places in (write.records or {}).values():
                assert len(indices) == len(places)
                assert all(0 <= place <= (_PAGES - 1) * RECORD for place in places)
        offers.abandon()
        forget_all(directory)
        assert directory.used_bytes == 0
