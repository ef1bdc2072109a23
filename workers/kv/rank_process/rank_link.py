"""A rank's connection to its worker: a thread that answers the worker and copies offered pages into the store.

The scheduler's own thread only registers offers and looks requests up, so it never waits for the worker.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from zmq import LINGER, NOBLOCK, PAIR, POLLIN, RCVHWM, SNDHWM, Again, Context, Poller

from workers.kv.rank_messages import (
    Allow,
    Done,
    Drop,
    Forgotten,
    Hello,
    LastPasses,
    Loaded,
    Offer,
    Refused,
    Settle,
    ToRank,
    ToWorker,
    Write,
    decode_to_rank,
    encode,
)
from workers.kv.rank_process.loadable_records import ByPool, LoadableRecords
from workers.kv.rank_process.offer_queue import Offered, OfferQueue, StoreWriter

log = logging.getLogger(__name__)


_REFUSAL_MS = 5000


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
        geometry: `KvGeometry.to_json` of the rank's pools.
        writer: copies pages.
        warnings: for the worker's log, because SGLang shows only errors of its ranks.
    """

    def __init__(
        self, address: str, rank: int, geometry: dict[str, object], writer: StoreWriter, warnings: Sequence[str] = ()
    ) -> None:
        self._rank = rank
        self._offers = OfferQueue(writer)
        self._loadable = LoadableRecords()
        self._outbox: deque[ToWorker] = deque([Hello(rank, geometry, list(warnings))])
        self._bell = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(address,), name="ampd-kv-rank", daemon=True)
        self._thread.start()

    # -- the scheduler's thread

    @property
    def completed(self) -> deque[bool]:
        """Results of offers that SGLang may take, oldest first: whether the pages are stored."""
        return self._offers.completed

    def offer(self, offered: Offered) -> None:
        """Offer pages; `completed` grows when the worker has decided and this rank has copied."""
        number = self._offers.add(offered)
        if self._rank == 0:
            keys = {pool: bytes.fromhex("".join(names)) for pool, names in offered.keys.items()}
            self._send(Offer(number, offered.session_id, keys))
        else:
            self._ring()

    def reset(self) -> None:
        """Forget all offers; returns when no page of the device is read any more."""
        self._send(Forgotten(self._offers.reset()))

    def loadable(self, rid: str) -> ByPool:
        """What a request may load."""
        return self._loadable.of(rid)

    def begin_load(self, rid: str) -> None:
        """The request's records are read from the store until `end_load`."""
        self._loadable.begin_load(rid)

    def loaded(self, rids: Sequence[str], seconds: float) -> None:
        """The records of these requests have been copied in one go. Rank 0 reports it; the thread does not matter."""
        if self._rank == 0:
            self._send(Loaded(list(rids), seconds))

    def tell_last_passes(self, rids: Sequence[str]) -> None:
        """The last pass of the prefill of these requests begins. Rank 0 reports it."""
        if self._rank == 0:
            self._send(LastPasses(list(rids)))

    def end_load(self, rid: str) -> None:
        """The request's load has ended, or was taken back."""
        for call in self._loadable.end_load(rid):
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
                    self._outbox.extend(self._offers.write())
                except Exception:
                    log.exception("KV link of rank %d failed in one turn", self._rank)
                while self._outbox:
                    with suppress(Again):  # without a worker a send would wait for ever
                        socket.send(encode(self._outbox.popleft()), NOBLOCK)

    def _answer(self, message: ToRank) -> None:
        match message:
            case Write():
                self._offers.decide(message)
            case Allow(call, rid, records):
                self._loadable.allow(rid, records)
                self._outbox.append(Done(call))
            case Drop(call, rid):
                if self._loadable.drop(rid, call):
                    self._outbox.append(Done(call))
            case Settle(call):
                self._outbox.append(Done(call, self._offers.offered))
