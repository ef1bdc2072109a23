"""The write-through of one engine, in the worker: which of the offered pages are copied, and when they are readable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from workers.kv.rank_messages import Forgotten, Offer, ToWorker, Write, Written, split
from workers.kv.store.directory import Reservation, StoreDirectory

log = logging.getLogger(__name__)

Checksums = Mapping[str, Sequence[int]] | None
"""Pool -> checksum of each record of a reservation; None: there are none here."""


@dataclass(slots=True)
class _Copy:
    """An offer that ranks are copying."""

    reservation: Reservation
    waiting: set[int]
    digests: set[bytes]


class Offers:
    """Offers of one engine, in their order.

    Args:
        ranks: of the engine. Pages are readable when every rank has copied its part.
        send: to all ranks.
        changed: called when the directory has changed.
        sum_up: makes the checksums of the records that were written, now or later, and passes them on.
        clock: as the directory's.

    Attributes:
        decided: offers so far for which there was a decision.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        ranks: int,
        send: Callable[[Write], None],
        changed: Callable[[], None],
        sum_up: Callable[[Reservation, Callable[[Checksums], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._ranks = frozenset(range(ranks))
        self._send = send
        self._changed = changed
        self._sum_up = sum_up
        self._clock = clock
        self._copies: dict[int, _Copy] = {}
        self._summed: dict[int, Reservation] = {}
        self.decided = 0
        self._forgotten = dict.fromkeys(self._ranks, 0)
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._has_gone = False

    def receive(self, rank: int, message: ToWorker) -> None:
        """A message of a rank.

        Raises:
            ValueError, KeyError: it is not one that a rank sends here.
        """
        match message:
            case Offer():
                self._decide(message)
            case Written(number, digest):
                if number in self._copies:
                    self._reported(rank, number, digest)
            case Forgotten(below):
                self._forgotten[rank] = below
                for number in [number for number in self._copies if number < below]:
                    self._reported(rank, number, b"")
            case _:
                return
        self._wake()

    async def settled(self, offers: int) -> None:
        """Wait until the first `offers` offers are readable, or were refused. Raises `ConnectionError`: it has gone."""
        if self._has_gone:  # the call that counted the offers may end after the engine
            raise ConnectionError("the engine has gone")
        if self._is_settled(offers):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((offers, done))
        await done

    def abandon(self) -> None:
        """The engine has gone: what it did not finish copying is given up."""
        self._has_gone = True
        for reservation in [*(copy.reservation for copy in self._copies.values()), *self._summed.values()]:
            self._directory.give_up(reservation.id)
        self._copies.clear()
        self._summed.clear()
        for _, done in self._waiting:
            if not done.done():
                done.set_exception(ConnectionError("the engine has gone"))
        self._waiting.clear()

    def _decide(self, offer: Offer) -> None:
        if offer.number < self.decided:
            raise ValueError(f"offer {offer.number} is made twice")
        keys = {pool: split(joined) for pool, joined in offer.keys.items()}
        reservation = self._directory.reserve(offer.session_id, keys, self._clock())
        self.decided = offer.number + 1
        if reservation is None:
            self._send(Write(offer.number, None))
            return
        waiting = {rank for rank in self._ranks if offer.number >= self._forgotten[rank]}
        if not waiting:
            self._directory.give_up(reservation.id)
            return
        forgotten = set() if waiting == self._ranks else {b""}
        self._copies[offer.number] = _Copy(reservation, waiting, forgotten)
        records = {pool: (list(places.names), list(places.offsets)) for pool, places in reservation.offsets.items()}
        self._send(Write(offer.number, records))
        self._changed()

    def _reported(self, rank: int, number: int, digest: bytes) -> None:
        """A rank has copied its part (with the digest of what it was offered), or never will (empty)."""
        copy = self._copies[number]
        copy.waiting.discard(rank)
        copy.digests.add(digest)
        if copy.waiting:
            return
        del self._copies[number]
        if len(copy.digests) == 1 and digest:
            self._summed[number] = copy.reservation
            self._sum_up(copy.reservation, partial(self._written, number))
        else:
            if b"" not in copy.digests:
                log.error("the ranks of the engine offered different pages (offer %d): they are not kept", number)
            self._directory.give_up(copy.reservation.id)
        self._changed()

    def _written(self, number: int, checksums: Checksums) -> None:
        """The records of an offer are complete, and so are their checksums."""
        reservation = self._summed.pop(number, None)
        if reservation is not None:  # the engine may have gone meanwhile
            self._directory.written(reservation.id, checksums)
            self._changed()
            self._wake()

    def _is_settled(self, offers: int) -> bool:
        return self.decided >= offers and all(number >= offers for number in (*self._copies, *self._summed))

    def _wake(self) -> None:
        ready = [waiting for waiting in self._waiting if self._is_settled(waiting[0])]
        for waiting in ready:
            self._waiting.remove(waiting)
            if not waiting[1].done():
                waiting[1].set_result(None)
