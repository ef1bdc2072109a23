"""Reads records from the stores of other workers into this worker's store, and what both sides need to know for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from ampd.background_tasks import BackgroundTasks
from ampd.wire import KvReply, KvRequest, LeasedRecords
from workers.kv.shared import KvGeometry, NotNegative, Place, mismatch
from workers.kv.store.directory import MAX_LEASE_S, Checksums, Loadable, Reservation, StoreDirectory

log = logging.getLogger(__name__)

_LEASE_MARGIN_S = 2.0
"""A lease outlives the read that it protects by this much; the reader's own limit comes first."""
_CLEAN_UP_S = 5.0

Keys = Mapping[str, Sequence[bytes]]
"""By pool, the keys of consecutive pages."""


class KvPeers(Protocol):
    """How a worker calls the KV endpoint of another worker."""

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        """Call a worker. After a `TimeoutError` or `ConnectionError` the worker recomputes the KV."""
        ...


class KvStore(Protocol):
    """What an exchange needs of a worker's store: `EngineStore`, or `ModelledStore` of a modelled engine.

    Attributes:
        changed: called when sessions may hold more or less than before.
        in_place: how records of neighbours are loaded where they lie; None: they are not.
    """

    changed: Callable[[], None]

    @property
    def in_place(self) -> InPlace | None: ...

    @property
    def directory(self) -> StoreDirectory: ...

    @property
    def geometry(self) -> KvGeometry: ...

    @property
    def place(self) -> tuple[int, int]:
        """Where the store lies in this process, and its bytes."""
        ...

    async def open(self, timeout_s: float) -> None:
        """Meet the engine's ranks. Raises `TimeoutError`; `ValueError` if they differ."""
        ...

    async def close(self) -> None: ...

    async def settle(self, timeout_s: float) -> None:
        """Wait until all that the engine has computed so far is readable. Raises `TimeoutError`, `ConnectionError`."""
        ...

    async def checksums(self, offsets: Mapping[str, Sequence[int]]) -> Checksums:
        """By pool, the checksums of the records at offsets, as they are in memory now."""
        ...

    async def put(self, keys: Sequence[bytes]) -> None:
        """Take what lies in free memory for the KV of a context, so that moves and loads of it can be timed."""
        ...

    def without_engine(self, tokens: int) -> Self:
        """A store of the same kind that no engine uses, with room for so many tokens."""
        ...

    def protect(self, rid: str, keys: Sequence[bytes]) -> Loadable:
        """Protect the stored part of a context until `unprotect`, because a request may load it."""
        ...

    def unprotect(self, rid: str) -> None:
        """End the protection for a request."""
        ...


class InPlace(Protocol):
    """Loads from the stores of neighbours: workers of this host and user.

    Attributes:
        host: its name, as `this_host`.
    """

    host: str

    @property
    def place_for_neighbours(self) -> Place:
        """How neighbours map the store."""
        ...

    async def first_offset(self, worker_id: str, descriptor: Descriptor) -> int | None:
        """Where the store of another worker begins in the offsets of this one; None: it cannot be read in place."""
        ...

    def lend(self, places: Mapping[int, int], until_s: float) -> Lending:
        """Let requests load from other offsets than those of the store, until `end_lending` and not after `until_s`."""
        ...

    async def end_lending(self, lending: Lending, *, are_written: bool) -> None:
        """The records are in the store now, or never will be. Returns when none of them is read from elsewhere."""
        ...

    async def are_written(self, offsets: Iterable[int]) -> bool:
        """Wait until these records lie in the store, also those that were lent; False: some never will."""
        ...

    def copy(
        self, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
    ) -> tuple[Future[int], Callable[[], None]]:
        """Copy blocks of other workers' stores, by their offsets here, as `Transport.read`."""
        ...


class Descriptor(Struct, frozen=True):
    """What a reader needs to read the store of another worker; it travels in the answer to a lease.

    Attributes:
        address, size_bytes: where the store lies in its worker's memory.
        agent: the metadata of its transport.
        host, place: as `InPlace.host` and `InPlace.place_for_neighbours`; no place: nobody loads its records in place.
    """

    geometry: KvGeometry
    address: NotNegative
    size_bytes: NotNegative
    agent: bytes
    host: str = ""
    place: Place | None = None


@dataclass(slots=True, eq=False)
class Lending:
    """Records that requests load from the store of a neighbour while they are copied from there.

    Attributes:
        places: of each record, where it lies there, by the offset at which it will lie here.
        until_s: until when they must have been loaded.
        requests: what requests may load of them.
        written: ends when they lie here (true), or never will.
    """

    places: Mapping[int, int]
    until_s: float
    requests: dict[str, Loadable] = field(default_factory=dict)
    written: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


encode_descriptor = Encoder().encode
decode_descriptor = Decoder(Descriptor).decode
"""It raises `ValueError` for anything else than a descriptor."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The store of another worker: its agent, and where the store lies in that worker's memory."""

    worker_id: str
    agent: bytes
    address: int


class Transport(Protocol):
    """How records of another store come into this one: `NixlTransport`, or `ModelledTransport` of a modelled engine."""

    metadata: bytes

    def read(
        self, remote: Remote, theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]
    ) -> tuple[Future[int], Callable[[], None]]:
        """Start a read. The future ends only when nothing is written any more; the function gives the read up."""
        ...

    def let_read(self, until_s: float) -> None:
        """Let other workers read until then."""
        ...

    def close(self) -> None: ...


class PeerReads:
    """Reads of one worker.

    Args:
        clock: as the store's.
    """

    def __init__(self, store: KvStore, transport: Transport, peers: KvPeers, clock: Callable[[], float]) -> None:
        self._store = store
        self._transport = transport
        self._peers = peers
        self._clock = clock
        self._arrivals = Arrivals()
        self._late = BackgroundTasks()

    async def read(self, rid: str, keys: Sequence[bytes], expected: int, source: str, deadline_s: float) -> int:
        """Read what a worker has of `keys` and this one lacks; returns bytes.

        Args:
            rid: of the request that needs them. What was read is protected for it.
            expected: how many of the keys the worker is expected to have.

        Raises:
            TimeoutError, ConnectionError: the worker, or the transport, does not answer or failed.
            ValueError: the worker has another kind of KV, or its answer makes no sense.
            RuntimeError: the store has no room, or the worker refused.
        """
        size, is_complete = 0, False
        while not is_complete:
            more, is_complete = await self._read_once(rid, keys, expected, source, deadline_s)
            size += more
        return size

    async def _read_once(
        self, rid: str, keys: Sequence[bytes], expected: int, source: str, deadline_s: float
    ) -> tuple[int, bool]:
        """Read what neither this store has nor another read brings; returns bytes, and False if that one has failed."""
        asked_s = self._clock()
        left_s = deadline_s - asked_s
        request = KvRequest(op="lease", keys=list(keys), ttl_s=left_s + _LEASE_MARGIN_S, expected=expected)
        reply = await self._peers.call(source, request, left_s)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        if not reply["lease_id"]:
            return 0, True
        lease = _PageLease(source, reply["lease_id"], asked_s + min(request["ttl_s"], MAX_LEASE_S))
        try:
            lease.descriptor = decode_descriptor(reply["descriptor"])
            if different := mismatch(self._store.geometry, lease.descriptor.geometry):
                raise ValueError(f"{source} has another kind of KV: {different}")
            lease.offsets = _checked(reply["records"], len(keys), lease.descriptor)
            lease.checksums = reply.get("checksums") or {}
            return await self._read_leased(rid, keys, lease, deadline_s)
        finally:
            if not lease.is_returned:
                self._late.spawn(self._unlease(lease, self._clock() + _CLEAN_UP_S))

    async def close(self) -> None:
        """End the calls that return leases."""
        await self._late.cancel()

    async def _read_leased(
        self, rid: str, keys: Sequence[bytes], lease: _PageLease, deadline_s: float
    ) -> tuple[int, bool]:
        """Read what is missing here, and wait for the records that other reads bring already."""
        wanted = {pool: [keys[index] for index in found] for pool, found in lease.offsets.items()}
        others = self._arrivals.of(wanted)
        # Of no session yet: its session takes them over when it begins.
        reservation = self._store.directory.reserve("", wanted, self._clock())
        if reservation is None:
            raise RuntimeError("the store has no room")
        with self._arrivals.announced(wanted, reservation):
            size = await self._read_reserved(rid, lease, reservation, deadline_s)
        # Where one of them is late, the rest of the context is computed.
        return size, await have_come(others, max(0.0, deadline_s - self._clock()))

    async def _read_reserved(self, rid: str, lease: _PageLease, reservation: Reservation, deadline_s: float) -> int:
        directory = self._store.directory
        pairs = self._pairs(lease, reservation)
        if not pairs:
            directory.written(reservation.id, rid=rid)
            return 0
        done: Future[int] | None = None
        is_kept = False
        try:
            assert lease.descriptor is not None
            in_place = self._store.in_place
            if in_place is not None and directory.can_lend(reservation.id):
                first = await in_place.first_offset(lease.source, lease.descriptor)
                if first is not None:
                    is_kept = await self._lend(in_place, rid, lease, reservation, first)
                    return sum(size for _, _, size in pairs)
            remote = Remote(lease.source, lease.descriptor.agent, lease.descriptor.address)
            done, abandon = self._transport.read(remote, *joined_blocks(pairs))
            size = await self._finished(done, abandon, deadline_s)
            # The records may be used only if the lease still holds now. Otherwise their owner may have reused them.
            checksums, holds = await asyncio.gather(
                self._store.checksums({pool: places.offsets for pool, places in reservation.offsets.items()}),
                self._unlease(lease, deadline_s),
            )
            _verify(checksums, lease, reservation, holds=holds)
            directory.written(reservation.id, checksums, rid=rid)
            is_kept = True
            return size
        finally:
            if not is_kept:
                self._give_up(reservation, done)

    async def _lend(self, in_place: InPlace, rid: str, lease: _PageLease, reservation: Reservation, first: int) -> bool:
        """Let requests load records where they lie, in the store of a neighbour, and copy them from there meanwhile.

        Until the lease ends, its owner protects them. A copy that ends later is not kept.

        Args:
            first: the offset of that store.

        Returns:
            True: the reservation and the lease end with the copy.
        """
        pairs = [(first + there, here, size) for there, here, size in self._pairs(lease, reservation)]
        places = {here: there for there, here, _ in pairs}
        offsets = {pool: [places[here] for here in of.offsets] for pool, of in reservation.offsets.items()}
        checksums = await self._store.checksums(offsets)
        _verify(checksums, lease, reservation, holds=self._clock() < lease.ends_s)
        done, abandon = in_place.copy(*joined_blocks(pairs))
        lending = in_place.lend(places, lease.ends_s)
        self._store.directory.lend(reservation.id, checksums, rid)
        lease.is_returned = True

        async def until_it_is_here() -> None:
            are_written = False
            try:
                await self._finished(done, abandon, lease.ends_s)
                are_written = self._clock() < lease.ends_s
            except (TimeoutError, ConnectionError):
                log.warning("KV exchange: records of %s were not copied before their lease ended", lease.source)
            finally:
                if are_written:
                    self._store.directory.written(reservation.id)
                else:
                    self._give_up(reservation, done)
                await in_place.end_lending(lending, are_written=are_written)
                await self._unlease(lease, self._clock() + _CLEAN_UP_S)

        self._late.spawn(until_it_is_here())
        return True

    async def _finished(self, done: Future[int], abandon: Callable[[], None], deadline_s: float) -> int:
        try:
            async with asyncio.timeout(deadline_s - self._clock()):
                return await asyncio.shield(asyncio.wrap_future(done))
        except BaseException:
            abandon()
            raise

    def _give_up(self, reservation: Reservation, done: Future[int] | None) -> None:
        """Free what was reserved, but not before the transport has stopped writing there."""
        directory = self._store.directory
        if done is None or done.done():
            directory.give_up(reservation.id)
            return
        # The engine computes these pages now. They have to be stored.
        directory.withdraw(reservation.id)
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(directory.give_up, reservation.id))

    def _pairs(self, lease: _PageLease, reservation: Reservation) -> list[tuple[int, int, int]]:
        """(Offset there, offset here, bytes) of each record that is missing here."""
        pairs = []
        for pool in self._store.geometry.pools:
            theirs = list(lease.offsets.get(pool.name, {}).values())
            ours = reservation.offsets.get(pool.name)
            if ours is not None:
                pairs += [(theirs[index], offset, pool.record_bytes) for index, offset in ours]
        return pairs

    async def _unlease(self, lease: _PageLease, deadline_s: float) -> bool:
        """Return a lease; False if it had ended, or its owner does not answer."""
        lease.is_returned = True
        request = KvRequest(op="unlease", lease_id=lease.id)
        try:
            reply = await self._peers.call(lease.source, request, max(0.1, deadline_s - self._clock()))
        except (TimeoutError, ConnectionError) as error:
            log.debug("KV exchange: unlease at %s: %s", lease.source, error)
            return False
        return "error" not in reply


@dataclass(slots=True)
class _PageLease:
    """A lease on records of another worker.

    Attributes:
        ends_s: it holds until then at least, by the clock of this worker, unless it is returned.
        offsets: by pool, where each record lies there, by the position of its key among those that were asked for.
        checksums: by pool and in the order of `offsets`, of each record; None where the owner has none.
        is_returned: whether it was given back.
    """

    source: str
    id: str
    ends_s: float
    descriptor: Descriptor | None = None
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    checksums: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    is_returned: bool = False


def _verify(ours: Checksums, lease: _PageLease, reservation: Reservation, *, holds: bool) -> None:
    """Check what was read: `holds`: whether the lease holds now, after that.

    Raises:
        RuntimeError: the lease had ended, or a record has another checksum than the one that its owner made.
    """
    if not holds:
        raise RuntimeError(f"{lease.source} ended the lease before its pages were read")
    for pool, of_records in (ours or {}).items():
        theirs = lease.checksums.get(pool)
        for index, checksum in zip(reservation.offsets[pool].names, of_records, strict=True):
            if theirs and theirs[index] not in (None, checksum):
                raise RuntimeError(f"what was read from {lease.source} has other checksums than what was written there")


def _checked(records: Mapping[str, LeasedRecords], asked: int, descriptor: Descriptor) -> dict[str, dict[int, int]]:
    """By pool, the offset of each record by the position of its key among those that were asked for.

    Raises:
        ValueError: a record is named that was not asked for, or lies outside of the store.
    """
    sizes = {pool.name: pool.record_bytes for pool in descriptor.geometry.pools}
    checked: dict[str, dict[int, int]] = {}
    for pool, (indices, offsets) in records.items():
        if pool not in sizes or len(indices) != len(offsets):
            raise ValueError(f"records of an unknown kind: {pool[:20]!r}")
        if indices and not 0 <= min(indices) <= max(indices) < asked:
            raise ValueError("more pages were named than were asked for")
        if offsets and not 0 <= min(offsets) <= max(offsets) <= descriptor.size_bytes - sizes[pool]:
            raise ValueError("pages outside of the store were named")
        checked[pool] = dict(zip(indices, offsets, strict=True))
    return checked


class Arrivals:
    """The records that reads of one worker are bringing, so that no second read misses them or brings them again.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._reads: dict[tuple[str, bytes], asyncio.Future[bool]] = {}

    def of(self, wanted: Keys) -> set[asyncio.Future[bool]]:
        """The reads that bring some of these records. Each future ends with its read: whether it brought them."""
        names = ((pool, key) for pool, keys in wanted.items() for key in keys)
        return {self._reads[name] for name in names if name in self._reads}

    @contextmanager
    def announced(self, wanted: Keys, reservation: Reservation) -> Iterator[None]:
        """Meanwhile a read brings the records of a reservation, which was made for `wanted`."""
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        are_here = False
        names = [(pool, wanted[pool][index]) for pool, places in reservation.offsets.items() for index in places.names]
        self._reads |= dict.fromkeys(names, ended)
        try:
            yield
            are_here = True
        finally:
            for name in names:
                if self._reads.get(name) is ended:
                    del self._reads[name]
            ended.set_result(are_here)


async def have_come(reads: Set[asyncio.Future[bool]], timeout_s: float) -> bool:
    """Wait for reads; False if one of them failed, so that its records have to be read again."""
    if not reads:
        return True
    ended, _ = await asyncio.wait(reads, timeout=timeout_s)
    return all(read.result() for read in ended)


def joined_blocks(pairs: Sequence[tuple[int, int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Records as large blocks: neighbours on both sides become one.

    Args:
        pairs: (offset there, offset here, bytes) of each record.

    Returns:
        (offset, bytes) of the blocks there, and of those here.
    """
    theirs: list[tuple[int, int]] = []
    ours: list[tuple[int, int]] = []
    for there, here, size in sorted(pairs, key=lambda pair: pair[1]):
        if ours and sum(theirs[-1]) == there and sum(ours[-1]) == here:
            theirs[-1] = (theirs[-1][0], theirs[-1][1] + size)
            ours[-1] = (ours[-1][0], ours[-1][1] + size)
        else:
            theirs.append((there, size))
            ours.append((here, size))
    return theirs, ours
