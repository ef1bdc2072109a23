"""A worker's store together with the ranks of its engine: what they write into it, and what requests load from it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from xxhash import xxh3_64_intdigest

from ampd.background_tasks import BackgroundTasks
from ampd.types import Factors
from workers.kv.neighbours import Neighbours
from workers.kv.peer_reads import Descriptor, Lending
from workers.kv.rank_links import Offers, RankLinks
from workers.kv.shared import (
    NEIGHBOUR_BYTES,
    KvGeometry,
    Loaded,
    Passes,
    PassFactors,
    Place,
    Records,
    StoreMemory,
    ToWorker,
    mismatch,
)
from workers.kv.store.directory import Checksums, Loadable, Reservation, StoreDirectory
from workers.kv.store.sessions import Surplus

log = logging.getLogger(__name__)

ReloadListener = Callable[[float, int], None]

_LONG_DROP_S = 60.0
"""Loads that take longer to end get a line in the log. Their records stay protected, because a rank may read them."""

_AT_ONCE_BYTES = 8 << 20
"""The checksum of this many bytes takes half a millisecond. Another thread would take as long to begin."""

_BITS = (1 << 63) - 1
"""Of a checksum. The highest bit is left out, so that every encoding of a message has room for it."""

_THREADS = 4
"""The most threads that compute checksums of one read at the same time."""


class EngineStore:
    """The store of one worker. It outlives its engine: `replace_engine` lets the ranks of a new one connect.

    Args:
        ranks: of the engine.
        surplus: as the directory's.
        clock: any monotonic clock.
        has_checksums: each record gets a checksum when it is written. It is verified when another worker reads it.
        host: name of the host whose workers map each other's stores; empty: all KV of other workers goes over NIXL.

    Attributes:
        changed: called when sessions may hold more or less than before.
        on_passes: called with the parts of a pass over prefills when it begins, as in `Passes`.
        on_factors: called when the rank has measured other times of passes.
    """

    def __init__(
        self,
        memory: StoreMemory,
        ranks: int,
        surplus: Surplus | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_checksums: bool = False,
        host: str = "",
    ) -> None:
        self.memory = memory
        self.host = host
        self.changed: Callable[[], None] = lambda: None
        self.on_passes: Callable[[Sequence[tuple[str, int, bool]]], None] = lambda _parts: None
        self.on_factors: Callable[[Factors], None] = lambda _factors: None
        self._ranks = ranks
        self._surplus = surplus
        self._has_checksums = has_checksums
        self._clock = clock
        self._directory: StoreDirectory | None = None
        self._geometry: KvGeometry | None = None
        self._offers: Offers | None = None
        self._links = RankLinks(ranks, self._receive)
        self._early: list[tuple[int, ToWorker]] = []
        self._known: dict[str, _Request] = {}
        self._neighbours = Neighbours(lambda *place: self._links.map(*place), lambda number: self._links.unmap(number))
        self._lent: dict[int, Lending] = {}
        self._late = BackgroundTasks()

    @property
    def place(self) -> tuple[int, int]:
        """Where the store lies in this process, and its bytes."""
        return self.memory.address, self.memory.size_bytes

    @property
    def in_place(self) -> EngineStore | None:
        """How records of neighbours are loaded where they lie; None: they are not."""
        return self if self.host else None

    @property
    def place_for_neighbours(self) -> Place:
        """How neighbours map the store."""
        return self.memory.place_for_neighbours

    @property
    def addresses(self) -> list[str]:
        """Where each rank of the engine connects."""
        return self._links.addresses

    @property
    def directory(self) -> StoreDirectory:
        """Which records are where; after `open`."""
        if self._directory is None:
            raise ConnectionError("the engine has not started")
        return self._directory

    @property
    def geometry(self) -> KvGeometry:
        """What a record looks like; after `open`."""
        if self._geometry is None:
            raise ConnectionError("the engine has not started")
        return self._geometry

    @property
    def capacity_tokens(self) -> int:
        """How many tokens of context the store has room for, without the records of windows and states."""
        return self.memory.size_bytes // self.geometry.page_bytes * self.geometry.page_size

    @property
    def refusal(self) -> str:
        """Why the engine's KV cannot be exchanged, in one line; empty: no rank has refused it."""
        return self._links.refusal

    async def open(self, timeout_s: float) -> None:
        """Meet the engine's ranks.

        Raises:
            TimeoutError: a rank did not connect.
            ValueError: ranks differ from each other, or from those of the engine before.
        """
        hellos = await self._links.hellos(timeout_s)
        for warning in dict.fromkeys(warning for hello in hellos for warning in hello.warnings):
            log.warning("KV store: %s", warning)
        for hello in hellos:
            geometry = hello.geometry
            if self._geometry is None:
                self._geometry = geometry
                self._directory = StoreDirectory(
                    self.memory.size_bytes, geometry.page_size, geometry.pools, self._surplus
                )
            elif different := mismatch(self._geometry, geometry):
                raise ValueError(f"rank {hello.rank} of the engine has another kind of KV: {different}")
        self._offers = Offers(self.directory, self._ranks, self._links.send, self.changed, self._sum_up, self._clock)
        for rank, message in self._early:
            self._offers.receive(rank, message)
        self._early.clear()

    async def replace_engine(self) -> None:
        """The engine's processes have ended: forget what they were about to write and to load. What is stored stays."""
        await self._neighbours.forget()
        self._forget_engine()
        await self._links.close()
        # What came from its other ranks meanwhile is not of the next engine, whose ranks count from the start.
        self._early.clear()
        self._links = RankLinks(self._ranks, self._receive)

    async def close(self) -> None:
        """End the connections, after the engine's processes have ended, and unmap the memory."""
        await self._late.cancel()
        await self._neighbours.close()
        self._forget_engine()
        await self._links.close()
        self.memory.close()

    async def checksums(self, offsets: Mapping[str, Sequence[int]]) -> Checksums:
        """By pool, the checksums of the records at offsets, as they are in memory now. Many leave the event loop.

        The offsets of a call are of one store: of this one, or of a neighbour.
        """
        if not self._has_checksums:
            return None
        return {name: await self._sums_at(name, of_pool) for name, of_pool in offsets.items()}

    # -- without an engine, to time moves and loads

    def without_engine(self, tokens: int) -> EngineStore:
        """A store of the same kind that no engine uses, with room for so many tokens. Its KV travels between hosts."""
        pages = tokens // self.geometry.page_size + 1
        size_bytes = sum(pool.record_bytes * (pool.window_pages or pages) for pool in self.geometry.pools)
        size_bytes *= 1 if len(self.geometry.pools) == 1 else 2  # records of several sizes leave gaps
        other = EngineStore(StoreMemory.create(size_bytes), 0, has_checksums=self._has_checksums)
        other._geometry = self._geometry
        other._directory = StoreDirectory(size_bytes, self.geometry.page_size, self.geometry.pools)
        return other

    async def put(self, keys: Sequence[bytes]) -> None:
        """Take what lies in free memory for the KV of a context, so that moves and loads of it can be timed."""
        of_pools = {pool.name: keys[-pool.window_pages :] for pool in self.geometry.pools}
        reservation = self.directory.reserve("", of_pools, self._clock())
        if reservation is not None:
            sums = await self.checksums({name: places.offsets for name, places in reservation.offsets.items()})
            self.directory.written(reservation.id, sums)

    # -- stores of neighbours

    async def first_offset(self, worker_id: str, descriptor: Descriptor) -> int | None:
        """Where the store of another worker begins in the offsets of this one; None: it cannot be read in place."""
        if descriptor.place is None or descriptor.host != self.host:
            return None
        return await self._neighbours.first_offset(worker_id, descriptor.place)

    def copy(
        self, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
    ) -> tuple[Future[int], Callable[[], None]]:
        """Copy blocks of neighbours, by their offsets here, as `Transport.read`."""
        return self._neighbours.copy(theirs, ours, self.memory)

    def lend(self, places: Mapping[int, int], until_s: float) -> Lending:
        """Let requests load from other offsets than those of the store, until `end_lending` and not after `until_s`."""
        lending = Lending(places, until_s)
        self._lent |= dict.fromkeys(places, lending)
        return lending

    async def end_lending(self, lending: Lending, *, are_written: bool) -> None:
        """The records are in the store now, or never will be. Returns when none of them is read from elsewhere.

        Requests that may load records which never will be here keep them until the lending's own end.
        """
        for offset in lending.places:
            del self._lent[offset]
        lending.written.set_result(are_written)
        if are_written:
            await asyncio.gather(*(self._allow_here(rid, loadable) for rid, loadable in lending.requests.items()))

    async def _allow_here(self, rid: str, loadable: Loadable) -> None:
        """Let a request load records from where they are now. Returns when it reads them nowhere else."""
        if (request := self._known.get(rid)) is None:
            return
        with suppress(ConnectionError):
            if request.ends:
                await request.ended.wait()
            else:
                await self._links.allow(rid, *self._places(rid, loadable), timeout_s=None)

    async def are_written(self, offsets: Iterable[int]) -> bool:
        """Wait until these records lie in the store, also those that were lent; False: some never will."""
        if not self._lent:
            return True
        lendings = {self._lent[offset] for offset in offsets if offset in self._lent}
        return all([await asyncio.shield(lending.written) for lending in lendings])

    # -- requests

    def protect(self, rid: str, keys: Sequence[bytes]) -> Loadable:
        """Protect the stored part of a context until `unprotect`, because a request may load it."""
        return self.directory.protect(rid, keys, self._clock())

    async def begin_request(
        self,
        rid: str,
        session_id: str,
        keys: Sequence[bytes],
        on_reload: ReloadListener = lambda _seconds, _requests: None,
        pays: Callable[[int], bool] = lambda _tokens: True,
        *,
        is_copy: bool = False,
    ) -> int:
        """A request is about to run. The engine may load what is stored of its context; returns those tokens.

        It may do so until the request has ended, because SGLang computes a request again that it had to interrupt.

        Args:
            on_reload: called with the seconds of the copies to the device, if there were any, and for how many requests
                they were.
            is_copy: another worker owns the session.
            pays: whether loading this many tokens is worth it. Otherwise the engine uses only what its device has.

        Raises:
            ConnectionError, TimeoutError: the engine has gone, or hangs.
        """
        if session_id:
            self.directory.sessions.begin_request(session_id, keys, is_copy=is_copy)
        loadable = self.protect(rid, keys)
        if loadable.tokens and not pays(loadable.tokens):
            self.directory.unprotect(rid)
            loadable = Loadable(0, {})
        if loadable.tokens:
            self._known[rid] = _Request(on_reload)
            await self._links.allow(rid, *self._places(rid, loadable))
        self.changed()
        return loadable.tokens

    def end_request(
        self, rid: str, session_id: str, keys: Sequence[bytes], given_up: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """The session's request is over; `keys` name its context now.

        Args:
            given_up: returns when the engine loads nothing more for the request; None: it has given it up already.
        """
        if session_id:
            self.directory.sessions.end_request(session_id, keys)
            self.changed()
        if rid in self._known:
            self._late.spawn(self._ended(rid, given_up))
        else:
            self.unprotect(rid)

    async def _ended(self, rid: str, given_up: Callable[[], Awaitable[None]] | None) -> None:
        if given_up is not None:
            await given_up()
        late = asyncio.get_running_loop().call_later(
            _LONG_DROP_S, log.error, "KV store: a rank has not ended the loads of a request in %g s", _LONG_DROP_S
        )
        request = self._known.get(rid)
        if request is not None:
            request.ends = True
        try:
            with suppress(ConnectionError):  # without the engine nothing is loaded
                await self._links.drop(rid)
        finally:
            late.cancel()
            if request is not None:
                request.ended.set()
        if self._known.get(rid) is request:
            self._known.pop(rid, None)
            self.unprotect(rid)

    def unprotect(self, rid: str) -> None:
        """End the protection for a request. Without effect while the engine has it; see `end_request`."""
        if rid not in self._known and self._directory is not None:
            self._directory.unprotect(rid)

    async def settle(self, timeout_s: float) -> None:
        """Wait until all that the engine has computed so far is readable.

        Raises:
            TimeoutError, ConnectionError: the engine hangs, or has gone.
        """
        if self._offers is None:
            return
        async with asyncio.timeout(timeout_s):
            await self._offers.settled(await self._links.offers())

    # -- inside

    def _sum_up(self, reservation: Reservation, done: Callable[[Checksums], None]) -> None:
        """Make the checksums of records that were written: at once if they are few."""
        if not self._has_checksums:
            done(None)
            return
        if self._bytes(reservation) <= _AT_ONCE_BYTES:
            done(
                {
                    name: self._sums_now(places.offsets, self.geometry.pool(name).record_bytes)
                    for name, places in reservation.offsets.items()
                }
            )
            return

        async def work() -> None:
            done(await self.checksums({name: places.offsets for name, places in reservation.offsets.items()}))

        self._late.spawn(work())

    async def _sums_at(self, pool: str, offsets: Sequence[int]) -> list[int]:
        """The checksums of a pool's records, of many bytes in a few threads at the same time."""
        record_bytes = self.geometry.pool(pool).record_bytes
        count = min(_THREADS, len(offsets) * record_bytes // _AT_ONCE_BYTES + 1)
        if count == 1:
            return self._sums_now(offsets, record_bytes)
        size = -(-len(offsets) // count)
        parts = [offsets[at : at + size] for at in range(0, len(offsets), size)]
        work = asyncio.gather(*(asyncio.to_thread(self._sums_now, part, record_bytes) for part in parts))
        try:
            return list(chain.from_iterable(await asyncio.shield(work)))
        except asyncio.CancelledError:
            await asyncio.wait({work})  # the memory must not be unmapped before
            raise

    def _sums_now(self, offsets: Sequence[int], record_bytes: int) -> list[int]:
        """Of records of one store."""
        if not offsets:
            return []
        memory, first = memoryview(self.memory.map), offsets[0] // NEIGHBOUR_BYTES * NEIGHBOUR_BYTES
        if first:
            memory = self._neighbours.at(first)[0].data
        with memory:
            return checksums_at(memory, [offset - first for offset in offsets], record_bytes)

    def _places(self, rid: str, loadable: Loadable) -> tuple[dict[str, Records], float]:
        """Where the records that a request may load lie now, and until when they do."""
        records = {
            pool: Records(b"".join(places.names), list(places.offsets)) for pool, places in loadable.records.items()
        }
        if not self._lent:
            return records, math.inf
        until_s = math.inf
        for of_pool in records.values():
            for number, offset in enumerate(of_pool.offsets):
                if (lending := self._lent.get(offset)) is not None:
                    of_pool.offsets[number] = lending.places[offset]
                    until_s = min(until_s, lending.until_s)
                    lending.requests[rid] = loadable
        return records, until_s

    def _bytes(self, reservation: Reservation) -> int:
        return sum(
            len(places.offsets) * self.geometry.pool(name).record_bytes for name, places in reservation.offsets.items()
        )

    def _receive(self, rank: int, message: ToWorker) -> None:
        if isinstance(message, Loaded):
            for rid in message.rids:
                if (request := self._known.get(rid)) is not None:
                    request.on_reload(message.seconds, len(message.rids))
        elif isinstance(message, Passes):
            self.on_passes(message.parts)
        elif isinstance(message, PassFactors):
            self.on_factors(message.factors)
        elif self._offers is None:
            self._early.append((rank, message))
        else:
            self._offers.receive(rank, message)

    def _forget_engine(self) -> None:
        if self._offers is not None:
            self._offers.abandon()
            self._offers = None
        for rid, request in self._known.items():
            request.ended.set()
            self.directory.unprotect(rid)
        self._known.clear()


@dataclass(slots=True)
class _Request:
    """A request that may load.

    Attributes:
        ends: the ranks were told that it loads nothing any more.
        ended: none of them loads for it.
    """

    on_reload: ReloadListener
    ends: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def checksum_of(record: memoryview) -> int:
    """XXH3 of a whole record: whether it is what its writer wrote. Other threads run meanwhile."""
    return xxh3_64_intdigest(record) & _BITS


def checksums_at(memory: memoryview, offsets: Sequence[int], record_bytes: int) -> list[int]:
    """Of the records at `offsets`, which all have as many bytes."""
    return [checksum_of(memory[offset : offset + record_bytes]) for offset in offsets]
