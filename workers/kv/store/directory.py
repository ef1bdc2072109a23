"""The directory of a KV store: what lies where, who needs it, and what goes when memory is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Generic, TypeVar
from uuid import uuid4

from ampd.serving.kv_eviction import Evictable
from workers.kv.shared import PoolGeometry
from workers.kv.store.records import RecordAllocator, aligned_bytes
from workers.kv.store.runs import Claimant, PageRun, PageSpan, PrefixRecords, RunTable, first_pages
from workers.kv.store.sessions import SessionTable, Surplus

MAX_LEASE_S = 60.0
"""A lease ends at the latest after this time, whatever its reader asks for."""

MAX_LEASES_PER_READER = 256
MAX_LEASES = 4096


Checksums = Mapping[str, Sequence[int]] | None
"""Pool -> checksum of each record of a reservation; None: there are none here."""

Name = TypeVar("Name", int, bytes)


@dataclass(frozen=True, slots=True)
class Places(Generic[Name]):
    """Where records lie, as two lists of the same length; a loop over it gives pairs.

    Attributes:
        names: of each record, its key or the index of its key in the keys that were given.
        offsets: of each record in the store, in bytes.
    """

    names: Sequence[Name]
    offsets: Sequence[int]

    def __iter__(self) -> Iterator[tuple[Name, int]]:
        return zip(self.names, self.offsets, strict=True)

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory for records that are about to be written.

    Attributes:
        id: for `written` or `give_up`, one of which must follow.
        offsets: by pool, with the indices of the keys that were given. Keys whose records the store has are left out.
    """

    id: int
    offsets: dict[str, Places[int]]


@dataclass(frozen=True, slots=True)
class Loadable:
    """What a request may load.

    Attributes:
        tokens: length of the longest restorable prefix.
        records: by pool, with their keys: every record of that prefix.
    """

    tokens: int
    records: dict[str, Places[bytes]]


@dataclass(frozen=True, slots=True)
class PageLease:
    """What a reader elsewhere may read until it gives the lease back.

    Attributes:
        id: "" if there is nothing to read, and nothing to give back.
        ttl_s: how long it lasts.
        pages: length of the longest restorable prefix.
        records: by pool, with the indices of the keys that were given. Of a pool with a window: the last window.
        checksums: pool -> checksum of each of `records`; None where the writer gave none.
    """

    id: str
    ttl_s: float
    pages: int
    records: dict[str, Places[int]]
    checksums: dict[str, list[int | None]]


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Size and use of a store, for metrics.

    Attributes:
        used_bytes, used_tokens: of all records, also of those that nobody needs and that wait for their eviction.
        evicted_tokens: by cause, since the start. unused: tokens of no session. surplus: the next round can compute
            them again within its target. idle: tokens of sessions between two rounds.
    """

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    evicted_tokens: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _LeasedPages(Claimant):
    reader: str = ""
    expires_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Writer(Claimant):
    """A reservation: the runs that it writes, and its records of other pools as (key, run, position, offset).

    Attributes:
        is_behind_hole: nothing can use its pages until earlier ones are stored.
        is_lent: its records can be found, although they are not written.
    """

    runs: list[PageRun] = field(default_factory=list)
    trailing: dict[str, list[tuple[bytes, PageRun, int, int]]] = field(default_factory=dict)
    is_behind_hole: bool = False
    is_lent: bool = False


class StoreDirectory:
    """Records by key, the sessions that claim them, and the writers and readers that protect them.

    A record lies in memory until memory is needed. Sessions share records by key. The first to go are records of no
    session, the least recently used first. Then go the ends of idle sessions that the next round can compute again and
    still meet its target (`surplus`), then idle sessions from their ends, the least recently used first. Protected
    records never go: those claimed by a writer, by a request that may load them, by a lease, or by a session with a
    running request.

    No clock and no I/O: every method that needs the time takes `now_s` (any monotonic clock, the same for all calls).
    Not thread-safe.

    Args:
        size_bytes: of the store's memory.
        page_size: tokens per page.
        pools: the first must have a record of every page (`window_pages` 0). The others may have one of every page.
        surplus: None: no tokens may be missing.
    """

    def __init__(
        self, size_bytes: int, page_size: int, pools: Sequence[PoolGeometry], surplus: Surplus | None = None
    ) -> None:
        if not pools or pools[0].window_pages:
            raise ValueError("the first pool must have a record of every page")
        self.page_size = page_size
        self.evicted_tokens: Counter[str] = Counter()
        self._main = pools[0].name
        self._record_bytes = {pool.name: pool.record_bytes for pool in pools}
        self._attention_windows = {pool.name: pool.window_pages for pool in pools[1:]}
        self._allocator = RecordAllocator(size_bytes, [pool.record_bytes for pool in pools])
        self._runs = RunTable(self._allocator)
        self.sessions = SessionTable(self._runs, page_size, self._attention_windows, surplus)
        self._ids = count(1)
        self._writers: dict[int, _Writer] = {}
        self._being_written: dict[tuple[str, bytes], _Writer] = {}
        self._requests: dict[str, Claimant] = {}
        self._leases: dict[str, _LeasedPages] = {}

    # -- figures

    @property
    def used_bytes(self) -> int:
        """Bytes of all records, also of those that are being written."""
        return self._allocator.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no record uses."""
        return self._allocator.free_bytes

    @property
    def used_tokens(self) -> int:
        """Tokens of all pages that can be found by key, also of those that are being written."""
        return self._runs.pages * self.page_size

    @property
    def session_tokens(self) -> int:
        """Tokens of the pages that sessions use; shared pages count once."""
        return self._runs.session_pages * self.page_size

    @property
    def figures(self) -> StoreFigures:
        """Size, use and evictions, for metrics."""
        capacity_bytes = self.used_bytes + self.free_bytes
        return StoreFigures(capacity_bytes, self.used_bytes, self.used_tokens, self.evicted_tokens)

    def match(self, keys: Sequence[bytes]) -> int:
        """Length in pages of the longest prefix of `keys` that can be restored."""
        return self._records(keys)[1]

    # -- writing

    def reserve(self, session_id: str, keys: Mapping[str, Sequence[bytes]], now_s: float) -> Reservation | None:
        """Memory for the records of a session that are neither stored nor being written; evicts to make room.

        Args:
            session_id: "": of no session.
            keys: pool -> keys of consecutive pages, from any page of the context on. A record of a further pool is left
                out if the first pool has no record of its page and gets none.

        Returns:
            None: refused, because there is no room, or the session was released and has begun nothing since.
        """
        self.collect(now_s)
        if self.sessions.is_released(session_id):
            return None
        if any(len(set(of_pool)) < len(of_pool) for of_pool in keys.values()):
            raise ValueError("a page is named twice")
        pages = keys.get(self._main, ())
        writer = _Writer(protects=True)
        # What is there already must not be evicted to make room for what follows it.
        self._claim_present(writer, keys)
        new = {pool: self._missing(pool, of_pool, pages) for pool, of_pool in keys.items()}
        offsets = self._allocate({pool: len(indices) for pool, indices in new.items()})
        if offsets is None:
            self._runs.release(writer)
            return None
        for pool, indices in new.items():
            if pool == self._main:
                self._add_runs(writer, pages, indices, offsets[pool])
        for pool, indices in new.items():
            if pool != self._main:
                self._add_trailing(writer, pool, [keys[pool][at] for at in indices], offsets[pool])
        writer.is_behind_hole = self.sessions.extend(session_id, pages)
        reservation_id = next(self._ids)
        self._writers[reservation_id] = writer
        return Reservation(reservation_id, {pool: Places(new[pool], offsets[pool]) for pool in new})

    def written(self, reservation_id: int, checksums: Checksums = None, rid: str = "") -> None:
        """The records of a reservation are complete: they can be found and read from now on.

        Args: as those of `lend`, which may have come before.

        Raises:
            KeyError: there is no such reservation, or it has ended.
        """
        writer = self._writers[reservation_id]
        if not writer.is_lent:
            self.lend(reservation_id, checksums, rid)
        del self._writers[reservation_id]
        self._runs.release(writer)
        if writer.is_behind_hole:
            for run in writer.runs:
                self._runs.evict_first(run)

    def can_lend(self, reservation_id: int) -> bool:
        """Whether `lend` may be called: its records are of no pages that another writer may still give up.

        Raises:
            KeyError: there is no such reservation, or it has ended.
        """
        writer = self._writers[reservation_id]
        others = {run for other in self._writers.values() if other is not writer for run in other.runs}
        return not any(record[1] in others for records in writer.trailing.values() for record in records)

    def lend(self, reservation_id: int, checksums: Checksums = None, rid: str = "") -> None:
        """The records of a reservation can be found from now on, although they are written only later.

        Meanwhile they can be loaded from elsewhere, and the writer protects them.

        Args:
            checksums: pool -> checksum of each record, in the order of the reservation's offsets.
            rid: a request that needs all pages that were named for the reservation, also behind a page that is
                not stored yet. They are protected for it from now on, as after `protect`.

        Raises:
            KeyError: there is no such reservation, or it has ended.
        """
        writer = self._writers[reservation_id]
        writer.is_lent = True
        checksums = checksums or {}
        remaining = iter(checksums.get(self._main, ()))
        for run in writer.runs:
            run.ready = True
            run.checksums[self._main] = dict(enumerate(islice(remaining, len(run.keys))))
        for pool, records in writer.trailing.items():
            for number, (key, run, at, offset) in enumerate(records):
                del self._being_written[pool, key]
                if run.dropped:
                    self._allocator.free([offset])
                    continue
                self._runs.add_trailing(run, pool, at, offset)
                if pool in checksums:
                    run.checksums.setdefault(pool, {})[at] = checksums[pool][number]
        self.sessions.note_changed({*writer.runs, *(record[1] for of in writer.trailing.values() for record in of)})
        if rid:
            self._claim_for(rid, [PageSpan(run, 0, pages) for run, pages in writer.path.items()])

    def withdraw(self, reservation_id: int) -> None:
        """Nobody waits for a writer any more, but it may still write. Another one may write the same records.

        Its memory is free after `give_up`, which must follow when it has stopped.

        Raises:
            KeyError: there is no such reservation, or it has ended.
        """
        writer = self._writers[reservation_id]
        self._unmark(writer)
        self._take_back(writer)
        for run in writer.runs:
            self.sessions.lose(run)
            self._runs.forget(run)

    def give_up(self, reservation_id: int) -> None:
        """The writer of a reservation has stopped for certain and has not finished: its memory is free again.

        Raises:
            KeyError: there is no such reservation, or it has ended.
        """
        writer = self._writers.pop(reservation_id)
        self._unmark(writer)
        self._take_back(writer)
        for records in writer.trailing.values():
            self._allocator.free([offset for _, _, _, offset in records])
        for run in writer.runs:
            self.sessions.lose(run)
            self._runs.discard(run)
        self._runs.release(writer)

    # -- readers

    def protect(self, rid: str, keys: Sequence[bytes], now_s: float) -> Loadable:
        """Protect the longest restorable prefix of `keys` for a request's loads until `unprotect`.

        What is protected for the request already stays protected.
        """
        self.collect(now_s)
        records, pages = self._records(keys)
        if not pages:
            return Loadable(0, {pool: Places((), ()) for pool in self._record_bytes})
        spans = first_pages(records.spans, pages)
        self._claim_for(rid, spans)
        found = {self._main: Places(keys[:pages], _offsets(spans))}
        for pool in self._attention_windows:
            there = list(records.trailing(pool, 0, pages))
            names = [keys[at - shift] for shift, _, positions in there for at in positions]
            found[pool] = Places(names, [run.trailing[pool][at] for _, run, positions in there for at in positions])
        return Loadable(pages * self.page_size, found)

    def unprotect(self, rid: str) -> None:
        """End the protection for a request. None of its loads may still run or start. An unknown one is no error."""
        if (claimant := self._requests.pop(rid, None)) is not None:
            self._runs.release(claimant)

    def lease(self, keys: Sequence[bytes], ttl_s: float, now_s: float, reader: str = "") -> PageLease:
        """Protect the longest restorable prefix of `keys` for a reader elsewhere until `unlease`, at most for `ttl_s`.

        `keys` may start at any page of a context. Then no window reaches back before that page.

        Raises:
            ValueError: `ttl_s` is not positive, or too many leases are live.
        """
        if not ttl_s > 0:
            raise ValueError(f"a lease of {ttl_s} s")
        ttl_s = min(ttl_s, MAX_LEASE_S)
        self.collect(now_s)
        live = sum(lease.reader == reader for lease in self._leases.values())
        if live >= MAX_LEASES_PER_READER or len(self._leases) >= MAX_LEASES:
            raise ValueError(f"{live} leases of this reader are live, and {len(self._leases)} of all readers")
        records, pages = self._records(keys)
        if not pages:
            return PageLease("", ttl_s, 0, {}, {})
        spans = first_pages(records.spans, pages)
        lease = _LeasedPages(protects=True, reader=reader, expires_s=now_s + ttl_s)
        self._runs.claim_spans(lease, spans)
        # A reader may return it to a worker that has started again under the same name: it must not know it then.
        lease_id = uuid4().hex
        self._leases[lease_id] = lease
        offsets: dict[str, Places[int]] = {self._main: Places(range(pages), _offsets(spans))}
        checksums = {self._main: [c for span in spans for c in _checksums(self._main, span.run, span.positions)]}
        for pool in self._attention_windows:
            there = list(records.trailing(pool, records.window_start(pool, pages), pages))
            names = [at - shift for shift, _, positions in there for at in positions]
            offsets[pool] = Places(names, [run.trailing[pool][at] for _, run, positions in there for at in positions])
            checksums[pool] = [c for _, run, positions in there for c in _checksums(pool, run, positions)]
        return PageLease(lease_id, ttl_s, pages, offsets, checksums)

    def unlease(self, lease_id: str, now_s: float) -> bool:
        """End a lease. True: it has protected its records up to now. False: it is unknown or had ended."""
        self.collect(now_s)
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._runs.release(lease)
        return True

    def collect(self, now_s: float) -> None:
        """End the leases whose time is over. Their records may be overwritten from now on, and not before."""
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]:
            self._runs.release(self._leases.pop(lease_id))

    # -- eviction

    def _allocate(self, counts: Mapping[str, int]) -> dict[str, list[int]] | None:
        """Offsets for `counts` records of each pool. It evicts no more than it must to make room for them."""
        by_size: Counter[int] = Counter()
        for pool, number in counts.items():
            by_size[self._record_bytes[pool]] += number
        if not self._allocator.fits(by_size) and not self._can_fit(counts, by_size):
            return None
        while not self._allocator.fits(by_size):
            short = max(number - self._allocator.available(size) for size, number in by_size.items())
            if not self._evict(max(1, short)):
                return None
        return {pool: self._allocator.allocate(self._record_bytes[pool], number) for pool, number in counts.items()}

    def _can_fit(self, counts: Mapping[str, int], by_size: Mapping[int, int]) -> bool:
        """Whether the records would fit if everything were evicted that may go. Otherwise nothing should be evicted."""
        evictable = {**self._runs.evictable_trailing, self._main: self._runs.pages - self._runs.protected_pages}
        missing_slots: Counter[int] = Counter()
        missing_bytes = -self._allocator.free_bytes
        for pool, record_bytes in self._record_bytes.items():
            missing = counts.get(pool, 0) - evictable.get(pool, 0)
            missing_slots[aligned_bytes(record_bytes)] += missing
            missing_bytes += missing * aligned_bytes(record_bytes)
        if all(missing <= self._allocator.free_slots(size) for size, missing in missing_slots.items()):
            return True  # each size finds room in what records of its own size leave
        return missing_bytes <= 0 and self._allocator.fits(by_size, without=self._runs.evictable_offsets())

    def _evict(self, pages: int) -> int:
        """Drop up to `pages` pages of what may go first; 0: nothing may go."""
        evictable = Evictable(self._runs.evict_unused, self.sessions.evict_surplus, self.sessions.evict_idle)
        cause, dropped = evictable.evict(pages)
        if dropped:
            self.evicted_tokens[cause] += dropped * self.page_size
        return dropped

    # -- inside

    def _records(self, keys: Sequence[bytes]) -> tuple[PrefixRecords, int]:
        """The records of a prefix that are stored, and how many pages of it can be restored."""
        records = PrefixRecords(list(self._runs.spans(keys)), self._attention_windows)
        return records, records.longest()

    def _claim_for(self, rid: str, spans: Sequence[PageSpan]) -> None:
        self._runs.claim_spans(self._requests.setdefault(rid, Claimant(protects=True)), spans)

    def _claim_present(self, writer: _Writer, keys: Mapping[str, Sequence[bytes]]) -> None:
        path: dict[PageRun, int] = {}
        for of_pool in keys.values():
            for _, span in self._runs.stretches(of_pool):
                path[span.run] = max(path.get(span.run, 0), span.at + span.pages)
        self._runs.set_path(writer, path)

    def _missing(self, pool: str, keys: Sequence[bytes], pages: Sequence[bytes]) -> list[int]:
        """Indices of the keys whose records must be written. `pages` are all pages that the reservation names."""
        if pool == self._main:
            return self._runs.absent(keys)
        stored: set[int] = set()
        present: set[bytes] = set(pages)
        for start, span in self._runs.stretches(keys):
            present.update(keys[start : start + span.pages])
            if of_pool := span.run.trailing.get(pool):
                stored.update(start + number for number, at in enumerate(span.positions) if at in of_pool)
        return [
            at
            for at, key in enumerate(keys)
            if at not in stored and key in present and (pool, key) not in self._being_written
        ]

    def _add_runs(self, writer: _Writer, keys: Sequence[bytes], indices: Sequence[int], offsets: Sequence[int]) -> None:
        """New runs for the pages at `indices`: one per stretch of consecutive pages."""
        start = 0
        for end in range(1, len(indices) + 1):
            if end == len(indices) or indices[end] != indices[end - 1] + 1:
                run = self._runs.add([keys[at] for at in indices[start:end]], offsets[start:end])
                writer.runs.append(run)
                self._runs.claim(writer, run, end - start)
                start = end

    def _take_back(self, writer: _Writer) -> None:
        """Let nothing find the records of further pools that were lent."""
        if not writer.is_lent:
            return
        writer.is_lent = False
        for pool, records in writer.trailing.items():
            kept = [record for record in records if self._runs.take_trailing(record[1], pool, *record[2:])]
            writer.trailing[pool] = kept

    def _unmark(self, writer: _Writer) -> None:
        """From now on other writers may write this writer's records of further pools."""
        for pool, records in writer.trailing.items():
            for key, _, _, _ in records:
                if self._being_written.get((pool, key)) is writer:
                    del self._being_written[pool, key]

    def _add_trailing(self, writer: _Writer, pool: str, keys: Sequence[bytes], offsets: Sequence[int]) -> None:
        """Add records of a further pool. Every page is stored or was just added, and the writer's claim protects it."""
        self._being_written |= {(pool, key): writer for key in keys}
        writer.trailing[pool] = [
            (keys[start + number], span.run, at, offsets[start + number])
            for start, span in self._runs.stretches(keys)
            for number, at in enumerate(span.positions)
        ]


def _offsets(spans: Sequence[PageSpan]) -> list[int]:
    return list(chain.from_iterable(span.run.offsets[span.at : span.at + span.pages] for span in spans))


def _checksums(pool: str, run: PageRun, positions: Sequence[int]) -> list[int | None]:
    given = run.checksums.get(pool)
    return [given.get(at) for at in positions] if given else [None] * len(positions)
