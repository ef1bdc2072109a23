"""The worker's connections to the ranks of its engine, and what becomes of the pages that they offer to the store."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from zmq import LINGER, NOBLOCK, PAIR, RCVHWM, SNDHWM, ZMQError
from zmq.asyncio import Context

from ampd.background_tasks import SupervisedTask
from workers.kv.shared import (
    Allow,
    Done,
    Drop,
    Forgotten,
    Hello,
    Map,
    Offer,
    Place,
    Records,
    Refused,
    Settle,
    ToRank,
    ToWorker,
    Unmap,
    Write,
    Written,
    decode_to_worker,
    encode,
    split,
)
from workers.kv.store.directory import Checksums, Reservation, StoreDirectory

log = logging.getLogger(__name__)


CALL_TIMEOUT_S = 30.0
"""A rank answers at once, also while it copies. But its process may compile kernels meanwhile."""


class RankLinks:
    """Sends to all ranks of an engine, and receives from them.

    The sockets' files lie in a private directory, which is removed as soon as all ranks are connected.

    Args:
        ranks: of the engine.
        on_message: called with the rank and each message that is not the answer to a call.

    Attributes:
        refusal: why a rank cannot exchange the KV of its engine, in one line; empty: none has refused it.
    """

    def __init__(self, ranks: int, on_message: Callable[[int, ToWorker], None]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ampd-kv-"))
        self.addresses = [f"ipc://{self._directory}/rank-{rank}" for rank in range(ranks)]
        self._context = Context()
        self._sockets = []
        for address in self.addresses:
            socket = self._context.socket(PAIR)
            for option, value in ((LINGER, 0), (SNDHWM, 0), (RCVHWM, 0)):
                socket.setsockopt(option, value)
            socket.bind(address)
            self._sockets.append(socket)
        self._calls = count(1)
        self._waiting: dict[tuple[int, int], asyncio.Future[Done]] = {}
        loop = asyncio.get_running_loop()
        self._hellos: list[asyncio.Future[Hello]] = [loop.create_future() for _ in range(ranks)]
        self.refusal = ""
        self._on_message = on_message
        self._readers = [SupervisedTask(f"kv-rank-{rank}", partial(self._read, rank)) for rank in range(ranks)]
        for reader in self._readers:
            reader.start()

    async def hellos(self, timeout_s: float) -> list[Hello]:
        """The first message of each rank. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            hellos = [await asyncio.shield(hello) for hello in self._hellos]
        shutil.rmtree(self._directory, ignore_errors=True)
        return hellos

    def send(self, message: ToRank) -> None:
        """Send to all ranks, without waiting for an answer. A rank gets messages in the order of the calls.

        Raises:
            ConnectionError: one of the engine's processes has gone. Without it a send would wait for ever.
        """
        data = encode(message)
        for rank in range(len(self._sockets)):
            self._send(rank, data)

    async def allow(
        self, rid: str, records: dict[str, Records], until_s: float = math.inf, timeout_s: float | None = CALL_TIMEOUT_S
    ) -> None:
        """Let a request load records, see `Allow`. Returns when all ranks know it; raises as `_call`."""
        await self._call_all(lambda call: Allow(call, rid, records, until_s), timeout_s)

    async def map(self, number: int, place: Place) -> str:
        """Map the store of a neighbour on all ranks. Returns why a rank cannot, in one line; empty: all have it.

        Raises:
            ConnectionError: the engine has gone.
        """
        answers = await self._call_all(lambda call: Map(call, number, place), None)
        return next((answer.refusal for answer in answers if answer.refusal), "")

    async def drop(self, rid: str) -> None:
        """A request loads nothing any more. Returns when no rank reads its records any more, however long that takes.

        Raises:
            ConnectionError: the engine has gone.
        """
        await self._call_all(lambda call: Drop(call, rid), None)

    def unmap(self, number: int) -> None:
        """Let the mapping of a neighbour go on all ranks. Raises `ConnectionError`: one of them has gone."""
        self.send(Unmap(number))

    async def offers(self) -> int:
        """How many offers SGLang has made so far; raises as `call`."""
        return (await self._call(0, Settle, CALL_TIMEOUT_S)).offers

    async def close(self) -> None:
        """End the connections and remove their files."""
        for reader in self._readers:
            await reader.stop()
        for hello in self._hellos:
            hello.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the engine's process has gone"))
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _call_all(self, message: Callable[[int], ToRank], timeout_s: float | None) -> list[Done]:
        return await asyncio.gather(*(self._call(rank, message, timeout_s) for rank in range(len(self._sockets))))

    async def _call(self, rank: int, message: Callable[[int], ToRank], timeout_s: float | None) -> Done:
        """Call a rank. `timeout_s`: None: without a limit.

        Raises:
            TimeoutError: the rank's process does not answer.
            ConnectionError: it has gone.
        """
        call = next(self._calls)
        answer = self._waiting[rank, call] = asyncio.get_running_loop().create_future()
        try:
            self._send(rank, encode(message(call)))
            async with asyncio.timeout(timeout_s):
                done: Done = await answer
                return done
        finally:
            self._waiting.pop((rank, call), None)

    def _send(self, rank: int, data: bytes) -> None:
        try:
            # A send that does not wait has happened when it returns.
            sent: Any = self._sockets[rank].send(data, NOBLOCK)
            sent.result()
        except ZMQError:  # also where the connections have been closed
            raise ConnectionError("the engine's process has gone") from None

    async def _read(self, rank: int) -> None:
        while True:
            message = decode_to_worker(await self._sockets[rank].recv())
            match message:
                case Done(call):
                    answer = self._waiting.get((rank, call))
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case Refused(_, reason):
                    self.refusal = self.refusal or reason
                case Hello():
                    if not self._hellos[rank].done():
                        self._hellos[rank].set_result(message)
                case _:
                    self._on_message(rank, message)


@dataclass(slots=True)
class _Copy:
    """An offer that ranks are copying."""

    reservation: Reservation
    waiting: set[int]
    digests: set[bytes]


class Offers:
    """The write-through of one engine: which of the offered pages are copied, and when they are readable.

    Offers come in their order.

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
