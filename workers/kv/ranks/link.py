"""A rank's connection to its worker: what SGLang offers to the store, and what its requests may load from it.

A thread answers the worker, and another one copies offered pages into the store: a copy waits for the pass that
computes its pages. The scheduler's own thread only registers offers and looks requests up, so it never waits for the
worker.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from zmq import LINGER, NOBLOCK, PAIR, POLLIN, RCVHWM, SNDHWM, Again, Context, Poller

from ampd.keys import KEY_BYTES
from ampd.types import Factors
from workers.kv.shared import (
    Allow,
    Done,
    Drop,
    Forgotten,
    Hello,
    KvGeometry,
    Loaded,
    Map,
    Offer,
    Passes,
    PassFactors,
    Place,
    Records,
    Refused,
    Settle,
    ToRank,
    ToWorker,
    Unmap,
    Write,
    Written,
    decode_to_rank,
    encode,
)

log = logging.getLogger(__name__)

_REFUSAL_MS = 5000

ByPool = Mapping[str, Mapping[str, int]]
"""By pool and key (hexadecimal, as the engine has it), the offset in the store."""


@dataclass(frozen=True, slots=True)
class Loadable:
    """What a request may load, and until when it must have done so (`time.monotonic`)."""

    records: ByPool = field(default_factory=dict)
    until_s: float = math.inf


class LoadableRecords:
    """Records by request. They are removed or replaced only when no load reads them.

    `of`, `begin_load` and `end_load` are for the scheduler's thread, `allow` and `drop` for the link's thread.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, Loadable] = {}
        self._loading: set[str] = set()
        self._calls: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def of(self, rid: str) -> Loadable:
        """What a request may load. A load of it looks here after `begin_load`."""
        return self._by_request.get(rid, Loadable())

    def begin_load(self, rid: str) -> None:
        """The request's records are read from the store until `end_load`."""
        with self._lock:
            self._loading.add(rid)

    def end_load(self, rid: str) -> list[int]:
        """The request's load has ended, or was taken back. Returns the numbers of the calls that waited for it."""
        with self._lock:
            self._loading.discard(rid)
            return self._calls.pop(rid, [])

    def allow(self, rid: str, records: Mapping[str, Records], until_s: float, number: int) -> bool:
        """A request may load these records. False: a load still runs, and `end_load` returns the number."""
        by_pool = {
            pool: dict(zip(_hexadecimal(found.keys), found.offsets, strict=True)) for pool, found in records.items()
        }
        self._by_request[rid] = Loadable(by_pool, until_s)
        return self._is_quiet(rid, number)

    def drop(self, rid: str, number: int) -> bool:
        """A request loads nothing any more. False: a load still runs, and `end_load` returns the number."""
        self._by_request.pop(rid, None)
        return self._is_quiet(rid, number)

    def _is_quiet(self, rid: str, number: int) -> bool:
        with self._lock:
            if rid in self._loading:
                self._calls.setdefault(rid, []).append(number)
                return False
        return True


class StoreWriter(Protocol):
    """Copies this rank's part of pages into the store."""

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Returns when the copy has ended."""
        ...


class Neighbours(Protocol):
    """Maps the stores of other workers of this host."""

    def map(self, number: int, place: Place) -> str:
        """Map a store. It may take seconds. Returns why that is not possible, in one line; empty: it is mapped."""
        ...

    def unmap(self, number: int) -> None:
        """Let a mapping go, after the loads from it that run."""
        ...


@dataclass(frozen=True, slots=True)
class Offered:
    """Pages that SGLang offers: locked on the device until the offer is completed.

    Attributes:
        keys: joined, by pool, as in a message.
        slots: gives, by pool, where the pages lie on the device. It waits until the device has written them.
    """

    session_id: str
    keys: dict[str, bytes]
    slots: Callable[[], Mapping[str, Sequence[int]]]


class OfferQueue:
    """Offers by number. The numbers, and the order of completion, are the same on all ranks.

    `add`, `reset` and `completed` are for the scheduler's thread, `decide` and `offered` for the link's thread, and
    `write` for the thread that copies.

    Attributes:
        completed: results of offers that SGLang may take, oldest first: whether the pages are stored.
        offered: how many offers there were.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self.completed: deque[bool] = deque()
        self.offered = 0
        self._writer = writer
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._offers: dict[int, Offered] = {}
        self._writes: dict[int, Write] = {}
        self._next = 0

    def add(self, offered: Offered) -> int:
        """Add an offer; returns its number."""
        with self._lock:
            number = self.offered
            self.offered += 1
            self._offers[number] = offered
        return number

    def reset(self) -> int:
        """Forget all offers; returns when no page of the device is read any more, with the number of the next offer."""
        with self._copying, self._lock:
            self._offers.clear()
            self._writes.clear()
            self._next = self.offered
            self.completed.clear()
            return self._next

    def decide(self, write: Write) -> None:
        """The worker's decision on an offer, which this rank may not have been made yet."""
        with self._lock:
            if write.number >= self._next:
                self._writes[write.number] = write

    def write(self) -> Iterator[Written]:
        """Copy the offers whose turn it is: those that were made and decided. Gives what to report of each."""
        while True:
            with self._copying:
                with self._lock:
                    number = self._next
                    if number not in self._offers or number not in self._writes:
                        return
                    offered, records = self._offers.pop(number), self._writes.pop(number).records
                    self._next += 1
                written = None if records is None else self._copy(number, offered, records)
                # The same result on all ranks, also where this copy failed: SGLang must do the same on all of them.
                self.completed.append(records is not None)
            if written is not None:
                yield written

    def _copy(self, number: int, offered: Offered, records: Mapping[str, tuple[list[int], list[int]]]) -> Written:
        try:
            slots = offered.slots()
            for pool, (indices, offsets) in records.items():
                self._writer.write(pool, [slots[pool][index] for index in indices], offsets)
            return Written(number, _digest(offered))
        except Exception:
            log.exception("offer %d could not be copied into the KV store", number)
            return Written(number, b"")


def _hexadecimal(keys: bytes) -> Iterator[str]:
    """Joined keys as SGLang has them."""
    text, width = keys.hex(), 2 * KEY_BYTES
    return (text[at : at + width] for at in range(0, len(text), width))


def _digest(offered: Offered) -> bytes:
    digest = sha256(offered.session_id.encode())
    for pool, keys in sorted(offered.keys.items()):
        digest.update(pool.encode() + keys)
    return digest.digest()


def refuse(address: str, rank: int, reason: str) -> None:
    """Send the worker the reason why this rank ends. Returns when the message is on its way."""
    with Context() as context, context.socket(PAIR) as socket:
        socket.setsockopt(LINGER, _REFUSAL_MS)
        socket.connect(address)
        socket.send(encode(Refused(rank, reason)))


class RankLink:
    """Offers of one rank, and what its requests may load.

    Args:
        address: of the worker's socket for this rank.
        rank: among the ranks that share out the heads.
        geometry: of the rank's pools.
        writer: copies pages.
        neighbours: maps stores.
        warnings: for the worker's log, because SGLang shows only errors of its ranks.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        geometry: KvGeometry,
        writer: StoreWriter,
        neighbours: Neighbours,
        warnings: Sequence[str] = (),
    ) -> None:
        self._rank = rank
        self._neighbours = neighbours
        self._offers = OfferQueue(writer)
        self._loadable = LoadableRecords()
        self._outbox: deque[ToWorker] = deque([Hello(rank, geometry, list(warnings))])
        self._bell = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._due = threading.Event()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(address,), name="ampd-kv-rank", daemon=True),
            threading.Thread(target=self._copy, name="ampd-kv-copy", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- the scheduler's thread

    @property
    def completed(self) -> deque[bool]:
        """Results of offers that SGLang may take, oldest first: whether the pages are stored."""
        return self._offers.completed

    def offer(self, offered: Offered) -> None:
        """Offer pages; `completed` grows when the worker has decided and this rank has copied."""
        number = self._offers.add(offered)
        if self._rank == 0:
            self._send(Offer(number, offered.session_id, offered.keys))
        self._due.set()

    def reset(self) -> None:
        """Forget all offers; returns when no page of the device is read any more."""
        self._send(Forgotten(self._offers.reset()))

    def loadable(self, rid: str) -> Loadable:
        """What a request may load. A load of it looks here after `begin_load`."""
        return self._loadable.of(rid)

    def begin_load(self, rid: str) -> None:
        """The request's records are read from the store until `end_load`."""
        self._loadable.begin_load(rid)

    def loaded(self, rids: Sequence[str], seconds: float) -> None:
        """The records of these requests have been copied in one go. Rank 0 reports it; the thread does not matter."""
        if self._rank == 0:
            self._send(Loaded(list(rids), seconds))

    def tell_passes(self, parts: Sequence[tuple[str, int, bool]]) -> None:
        """A pass over prefills begins, as in `Passes`. Rank 0 reports it."""
        if self._rank == 0:
            self._send(Passes(list(parts)))

    def tell_factors(self, factors: Factors) -> None:
        """The factors of passes have changed."""
        self._send(PassFactors(factors))

    def end_load(self, rid: str) -> None:
        """The request's load has ended, or was taken back."""
        for call in self._loadable.end_load(rid):
            self._send(Done(call))

    def close(self) -> None:
        """End the threads."""
        self._closing = True
        self._due.set()
        self._ring()
        for thread in self._threads:
            thread.join(10.0)
        os.close(self._bell)

    # -- its own threads

    def _send(self, message: ToWorker) -> None:
        self._outbox.append(message)
        self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _run(self, address: str) -> None:
        with Context() as context, context.socket(PAIR) as socket:
            for option, value in ((LINGER, 0), (SNDHWM, 0), (RCVHWM, 0)):
                socket.setsockopt(option, value)
            socket.connect(address)
            poller = Poller()
            poller.register(socket, POLLIN)
            poller.register(self._bell, POLLIN)
            while not self._closing:
                poller.poll()
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                try:
                    while socket.poll(0):
                        self._answer(decode_to_rank(socket.recv()))
                except Exception:
                    log.exception("KV link of rank %d failed in one turn", self._rank)
                while self._outbox:
                    with suppress(Again):  # without a worker a send would wait for ever
                        socket.send(encode(self._outbox.popleft()), NOBLOCK)

    def _copy(self) -> None:
        while not self._closing:
            self._due.wait()
            self._due.clear()
            for written in self._offers.write():
                if self._closing:
                    return  # the bell may be gone
                self._send(written)

    def _answer(self, message: ToRank) -> None:
        match message:
            case Write():
                self._offers.decide(message)
                self._due.set()
            case Allow(call, rid, records, until_s):
                if self._loadable.allow(rid, records, until_s, call):
                    self._outbox.append(Done(call))
            case Drop(call, rid):
                if self._loadable.drop(rid, call):
                    self._outbox.append(Done(call))
            case Map():
                threading.Thread(target=self._map, args=(message,), name="ampd-kv-map", daemon=True).start()
            case Unmap(number):
                threading.Thread(target=self._neighbours.unmap, args=(number,), name="ampd-kv-map", daemon=True).start()
            case Settle(call):
                self._outbox.append(Done(call, self._offers.offered))

    def _map(self, message: Map) -> None:
        refusal = self._neighbours.map(message.number, message.place)
        if not self._closing:  # the bell may be gone
            self._send(Done(message.call, refusal=refusal))
