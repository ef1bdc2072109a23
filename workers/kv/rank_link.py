"""A rank's connection to its worker: a thread that answers the worker and copies offered pages into the store.

The scheduler's own thread only registers offers and looks requests up, so it never waits for the worker.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from zmq import LINGER, NOBLOCK, PAIR, POLLIN, RCVHWM, SNDHWM, Again, Context, Poller

from workers.kv.rank_messages import (
    Done,
    Drop,
    Forgotten,
    Hello,
    Hold,
    Offer,
    Settle,
    ToRank,
    ToWorker,
    Write,
    Written,
    decode_to_rank,
    encode,
    split,
)

log = logging.getLogger(__name__)


class StoreWriter(Protocol):
    """Copies this rank's part of pages into the store."""

    def write(self, pool: str, slots: Sequence[int], offsets: Sequence[int]) -> None:
        """Returns when the copy has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Offered:
    """Pages that SGLang offers: locked on the device until the offer is completed.

    Attributes:
        keys: hexadecimal, by pool.
        slots: gives, by pool, where the pages lie on the device. It waits until the device has written them.
    """

    session_id: str
    keys: Mapping[str, Sequence[str]]
    slots: Callable[[], Mapping[str, Sequence[int]]]


class RankLink:
    """Offers and held records of one rank.

    Offers are copied and completed in the order in which they were made, which is the same on all ranks.

    Args:
        address: of the worker's socket for this rank.
        rank: among the ranks that share out the heads.
        writer: copies pages.

    Attributes:
        completed: results of offers that SGLang may take, oldest first: whether the pages are stored.
    """

    def __init__(self, address: str, rank: int, geometry: dict[str, object], writer: StoreWriter) -> None:
        self.completed: deque[bool] = deque()
        self._rank = rank
        self._writer = writer
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._offers: dict[int, Offered] = {}
        self._writes: dict[int, Write] = {}
        self._offered = 0
        self._next = 0
        self._held: dict[str, dict[str, dict[str, int]]] = {}
        self._loading: set[str] = set()
        self._drops: dict[str, list[int]] = {}
        self._outbox: deque[ToWorker] = deque([Hello(rank, geometry)])
        self._bell = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(address,), name="ampd-kv-rank", daemon=True)
        self._thread.start()

    # -- the scheduler's thread: offers

    def offer(self, offered: Offered) -> None:
        """Offer pages; `completed` grows when the worker has decided and this rank has copied."""
        with self._lock:
            number = self._offered
            self._offered += 1
            self._offers[number] = offered
        if self._rank == 0:
            keys = {pool: bytes.fromhex("".join(names)) for pool, names in offered.keys.items()}
            self._send(Offer(number, offered.session_id, keys))
        else:
            self._ring()

    def reset(self) -> None:
        """Forget all offers; returns when no page of the device is read any more."""
        with self._copying, self._lock:
            self._offers.clear()
            self._writes.clear()
            self._next = self._offered
            self.completed.clear()
        self._send(Forgotten(self._offered))

    # -- the scheduler's thread: loads

    def held(self, rid: str) -> Mapping[str, Mapping[str, int]]:
        """What a request may load: by pool and key (hexadecimal), the offset in the store."""
        return self._held.get(rid, {})

    def begin_load(self, rid: str) -> None:
        """The request's records are read from the store until `end_load`."""
        self._loading.add(rid)

    def end_load(self, rid: str) -> None:
        """The request's load has ended, or was taken back."""
        with self._lock:
            self._loading.discard(rid)
            calls = self._drops.pop(rid, [])
        for call in calls:
            self._send(Done(call))

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._ring()
        self._thread.join(10.0)
        os.close(self._bell)

    # -- this thread

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
                    self._write_next()
                except Exception:
                    log.exception("KV link of rank %d failed in one turn", self._rank)
                while self._outbox:
                    with suppress(Again):  # without a worker a send would wait for ever
                        socket.send(encode(self._outbox.popleft()), NOBLOCK)

    def _answer(self, message: ToRank) -> None:
        match message:
            case Write(number):
                with self._lock:
                    if number >= self._next:
                        self._writes[number] = message
            case Hold(call, rid, records):
                self._held[rid] = {
                    pool: dict(zip((key.hex() for key in split(found.keys)), found.offsets, strict=True))
                    for pool, found in records.items()
                }
                self._outbox.append(Done(call))
            case Drop(call, rid):
                self._held.pop(rid, None)
                with self._lock:
                    if rid in self._loading:
                        self._drops.setdefault(rid, []).append(call)
                        return
                self._outbox.append(Done(call))
            case Settle(call):
                self._outbox.append(Done(call, self._offered))

    def _write_next(self) -> None:
        """Copy the offers whose turn it is."""
        while True:
            with self._copying:
                with self._lock:
                    number = self._next
                    if number not in self._offers or number not in self._writes:
                        return
                    offered, records = self._offers.pop(number), self._writes.pop(number).records
                    self._next += 1
                if records is not None:
                    self._outbox.append(self._written(number, offered, records))
                # The same result on all ranks, also where this copy failed: SGLang must do the same on all of them.
                self.completed.append(records is not None)

    def _written(self, number: int, offered: Offered, records: Mapping[str, tuple[list[int], list[int]]]) -> Written:
        try:
            slots = offered.slots()
            for pool, (indices, offsets) in records.items():
                self._writer.write(pool, [slots[pool][index] for index in indices], offsets)
            return Written(number, _digest(offered))
        except Exception:
            log.exception("KV link of rank %d: offer %d could not be copied", self._rank, number)
            return Written(number, b"")


def _digest(offered: Offered) -> bytes:
    digest = sha256(offered.session_id.encode())
    for pool, keys in sorted(offered.keys.items()):
        digest.update(pool.encode() + bytes.fromhex("".join(keys)))
    return digest.digest()
