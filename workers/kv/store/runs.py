"""Runs of records: which pages lie in the store, where, up to where each run is needed, and what can be restored."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ampd.serving.shared_prefixes import PrefixUsers
from workers.kv.shared import restorable_lengths, window_start
from workers.kv.store.records import RecordAllocator


@dataclass(slots=True, eq=False)
class PageRun:
    """Consecutive pages that one reservation wrote. A run loses pages only at its end.

    Attributes:
        keys, offsets: of the pages' records in the pool that every page has.
        trailing: records of the other pools at some of the pages: pool -> position in the run -> offset.
        ready: the records have been written. The records in `trailing` are always written.
        claims: claimant -> how many of the first pages it needs.
        kinds: how many claims there are of each kind. A kind is (pages, is of a session, protects, is of a copy).
            Thousands of sessions may share a run, and nearly all of their claims are of one kind.
        session_pages, protected_pages: the most pages that a session of this worker needs, and the most that must not
            be evicted.
        checksums: of the records where the writer gave any: pool -> position -> checksum.
        users: the sessions that have used its pages.
        dropped: nothing finds these records any more. Their memory is free when the last claim has ended.
    """

    keys: list[bytes]
    offsets: list[int]
    trailing: dict[str, dict[int, int]] = field(default_factory=dict)
    ready: bool = False
    claims: dict[Claimant, int] = field(default_factory=dict)
    kinds: dict[tuple[int, bool, bool, bool], int] = field(default_factory=dict)
    session_pages: int = 0
    protected_pages: int = 0
    checksums: dict[str, dict[int, int]] = field(default_factory=dict)
    users: PrefixUsers = field(default_factory=PrefixUsers)
    dropped: bool = False

    def needed_pages(self, besides: Claimant | None = None) -> int:
        """How many pages from the start are claimed. `besides`: do not count this claimant."""
        own = None if besides is None else self._kind(besides)
        return max((kind[0] for kind, claims in self.kinds.items() if claims > (kind == own)), default=0)

    def is_shared(self, pages: int) -> bool:
        """Whether several sessions need the first `pages` pages."""
        return sum(claims for kind, claims in self.kinds.items() if kind[0] >= pages and kind[1]) > 1

    def set_claim(self, claimant: Claimant, pages: int) -> None:
        """Set a claim; 0 pages: end it."""
        if (kind := self._kind(claimant)) is not None:
            self.kinds[kind] -= 1
            if not self.kinds[kind]:
                del self.kinds[kind]
        if not pages:
            self.claims.pop(claimant, None)
            claimant.path.pop(self, None)
        else:
            self.claims[claimant] = claimant.path[self] = pages
            kind = pages, claimant.is_session, claimant.protects, claimant.is_copy
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def _kind(self, claimant: Claimant) -> tuple[int, bool, bool, bool] | None:
        pages = self.claims.get(claimant)
        return None if pages is None else (pages, claimant.is_session, claimant.protects, claimant.is_copy)


@dataclass(slots=True, eq=False)
class Claimant:
    """What needs pages: a session, a request that may load them, a lease of a reader elsewhere, or a writer.

    Attributes:
        protects: its pages are never evicted. Only a session without a running request does not protect.
        is_session: it is a session.
        is_copy: it is a session of another worker, whose pages here do not count as those of a session.
        path: how many of the first pages of each run it needs, in the order of its context.
    """

    protects: bool
    is_session: bool = False
    is_copy: bool = False
    path: dict[PageRun, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PageSpan:
    """Consecutive pages of a context that lie in one run: `pages` pages from position `at` of the run."""

    run: PageRun
    at: int
    pages: int

    @property
    def positions(self) -> range:
        return range(self.at, self.at + self.pages)


def first_pages(spans: Sequence[PageSpan], pages: int) -> list[PageSpan]:
    """The spans of the first `pages` pages."""
    short: list[PageSpan] = []
    for span in spans:
        if pages <= 0:
            break
        short.append(span if span.pages <= pages else PageSpan(span.run, span.at, pages))
        pages -= span.pages
    return short


def _span(run: PageRun, keys: Sequence[bytes], start: int) -> PageSpan:
    """The part of `keys` from index `start` on that lies in the run. The key at `start` does."""
    at = run.keys.index(keys[start])
    length = min(len(run.keys) - at, len(keys) - start)
    if run.keys[at : at + length] != list(keys[start : start + length]):
        length = next(i for i in range(length) if run.keys[at + i] != keys[start + i])
    return PageSpan(run, at, length)


class RunTable:
    """All runs of a store, by key, with the claims on them.

    A claim always covers the first pages of a run, because a page is of no use without the pages before it.

    Args:
        allocator: of the records' memory; the table frees what it drops.

    Attributes:
        pages, session_pages, protected_pages: pages that can be found, pages that sessions need, and pages that must
            stay.
        evictable_trailing: by further pool, the records at pages that may go.
    """

    def __init__(self, allocator: RecordAllocator) -> None:
        self._allocator = allocator
        self._index: dict[bytes, PageRun] = {}
        self._unused: OrderedDict[PageRun, None] = OrderedDict()
        self.pages = 0
        self.session_pages = 0
        self.protected_pages = 0
        self.evictable_trailing: Counter[str] = Counter()

    def spans(self, keys: Sequence[bytes], written_only: bool = True) -> Iterator[PageSpan]:
        """The longest prefix of `keys` that is in the store."""
        start = 0
        while start < len(keys) and (run := self._index.get(keys[start])) is not None:
            if written_only and not run.ready:
                return
            span = _span(run, keys, start)
            yield span
            start += span.pages

    def stretches(self, keys: Sequence[bytes]) -> Iterator[tuple[int, PageSpan]]:
        """All stretches of `keys` that are in the store, written or not, each with the index of its first key."""
        start = 0
        while start < len(keys):
            run = self._index.get(keys[start])
            if run is None:
                start += 1
                continue
            span = _span(run, keys, start)
            yield start, span
            start += span.pages

    def absent(self, keys: Sequence[bytes]) -> list[int]:
        """Indices of the keys that are not in the store and are not being written."""
        absent: list[int] = []
        end = 0
        for start, span in self.stretches(keys):
            absent += range(end, start)
            end = start + span.pages
        absent += range(end, len(keys))
        return absent

    def add(self, keys: Sequence[bytes], offsets: Sequence[int]) -> PageRun:
        """A new run, which is not written yet. It must be claimed at once."""
        run = PageRun(list(keys), list(offsets))
        self._index.update(dict.fromkeys(run.keys, run))
        self.pages += len(run.keys)
        return run

    def add_trailing(self, run: PageRun, pool: str, at: int, offset: int) -> None:
        """Add a record of a further pool to the page at a position of a run."""
        run.trailing.setdefault(pool, {})[at] = offset
        self.evictable_trailing[pool] += at >= run.protected_pages

    def take_trailing(self, run: PageRun, pool: str, at: int, offset: int) -> bool:
        """The opposite of `add_trailing`. False: the record has gone with its page."""
        if run.dropped or run.trailing.get(pool, {}).get(at) != offset:
            return False
        del run.trailing[pool][at]
        self.evictable_trailing[pool] -= at >= run.protected_pages
        return True

    # -- claims

    def claim_spans(self, claimant: Claimant, spans: Iterable[PageSpan]) -> None:
        """Extend a claimant's claims so that they cover the spans."""
        for span in spans:
            self.claim(claimant, span.run, max(span.at + span.pages, span.run.claims.get(claimant, 0)))

    def claim(self, claimant: Claimant, run: PageRun, pages: int) -> None:
        """Set how many of the first pages of a run a claimant needs; 0: none any more."""
        run.set_claim(claimant, pages)
        self._refresh(run)

    def set_path(self, claimant: Claimant, path: dict[PageRun, int]) -> None:
        """Replace all claims of a claimant. Pages that it no longer needs are the next to be evicted."""
        for run in reversed([run for run in claimant.path if run not in path]):
            self.claim(claimant, run, 0)
        for run, pages in path.items():
            if run.claims.get(claimant) != pages:
                self.claim(claimant, run, pages)
        claimant.path = path

    def release(self, claimant: Claimant) -> None:
        """End all claims of a claimant."""
        self.set_path(claimant, {})

    def set_kind(self, claimant: Claimant, *, protects: bool, is_copy: bool) -> None:
        """Set whether a claimant's pages are never evicted, and whether it is a session of another worker."""
        path = dict(claimant.path)
        for run in path:
            run.set_claim(claimant, 0)
        claimant.protects, claimant.is_copy = protects, is_copy
        for run, pages in path.items():
            self.claim(claimant, run, pages)

    # -- what goes

    def evictable_offsets(self) -> Iterator[int]:
        """Offsets of all records that may go. It looks at every page."""
        for run in dict.fromkeys(self._index.values()):
            yield from run.offsets[run.protected_pages :]
            for offsets in run.trailing.values():
                yield from (offset for at, offset in offsets.items() if at >= run.protected_pages)

    def evict_first(self, run: PageRun) -> None:
        """Make the part of a run that is not needed the first to be evicted."""
        if run in self._unused:
            self._unused.move_to_end(run, last=False)

    def evict_unused(self, pages: int) -> int:
        """Drop up to `pages` pages that no claim covers, of the run that has been unused for longest; returns how many.

        0: every page is needed.
        """
        run = next(iter(self._unused), None)
        if run is None:
            return 0
        return self.cut(run, max(run.needed_pages(), len(run.keys) - pages))

    def cut(self, run: PageRun, pages: int) -> int:
        """Drop the pages of a run from position `pages` on, which no claim covers; returns how many."""
        dropped = len(run.keys) - pages
        for key in run.keys[pages:]:
            del self._index[key]
        self._count_trailing(run, -1)
        self._free(run, pages)
        self._count_trailing(run, 1)
        self.pages -= dropped
        if pages <= run.needed_pages():
            self._unused.pop(run, None)
        return dropped

    def discard(self, run: PageRun) -> None:
        """Drop a run although it is claimed, because its writer gave it up."""
        self._hide(run)
        for claimant in list(run.claims):
            run.set_claim(claimant, 0)
        self._refresh(run)

    def forget(self, run: PageRun) -> None:
        """Let no key find a run any more. Its memory is free when the claims of its readers and writers have ended."""
        self._hide(run)
        for claimant in [claimant for claimant in run.claims if claimant.is_session]:
            run.set_claim(claimant, 0)
        self._refresh(run)

    def _refresh(self, run: PageRun) -> None:
        """Count again how many pages of a run are needed, after a claim has changed."""
        if run.dropped:
            if not run.claims:
                self._free(run, 0)
            return
        needed = session_pages = protected_pages = 0
        for pages, is_session, protects, is_copy in run.kinds:
            needed = max(needed, pages)
            if is_session and not is_copy:
                session_pages = max(session_pages, pages)
            if protects:
                protected_pages = max(protected_pages, pages)
        self.session_pages += session_pages - run.session_pages
        self.protected_pages += protected_pages - run.protected_pages
        run.session_pages = session_pages
        if protected_pages != run.protected_pages:
            self._count_trailing(run, -1)
            run.protected_pages = protected_pages
            self._count_trailing(run, 1)
        if needed < len(run.keys):
            self._unused[run] = None
            self._unused.move_to_end(run)
        else:
            self._unused.pop(run, None)

    def _hide(self, run: PageRun) -> None:
        if run.dropped:
            return
        run.dropped = True
        self._count_trailing(run, -1)
        for key in run.keys:
            del self._index[key]
        self.pages -= len(run.keys)
        self.session_pages -= run.session_pages
        self.protected_pages -= run.protected_pages
        self._unused.pop(run, None)

    def _count_trailing(self, run: PageRun, sign: int) -> None:
        for pool, offsets in run.trailing.items():
            self.evictable_trailing[pool] += sign * sum(at >= run.protected_pages for at in offsets)

    def _free(self, run: PageRun, pages: int) -> None:
        """Free the memory of a run from position `pages` on."""
        gone = range(pages, len(run.keys))
        self._allocator.free(run.offsets[pages:])
        del run.keys[pages:], run.offsets[pages:]
        for offsets in run.trailing.values():
            self._allocator.free([offsets.pop(at) for at in gone if at in offsets])
        for checksums in run.checksums.values():
            for at in gone:
                checksums.pop(at, None)


class PrefixRecords:
    """The records of a stored prefix.

    Args:
        spans: of the prefix, in order.
        attention_windows: pool -> how many pages at a prefix's end must have a record of the pool; 0: every page must.
            The first pool, which has a record of every page, is left out.
    """

    def __init__(self, spans: Sequence[PageSpan], attention_windows: Mapping[str, int]) -> None:
        self._attention_windows = attention_windows
        self.spans = spans
        self._starts = [0]
        for span in spans:
            self._starts.append(self._starts[-1] + span.pages)
        self.pages = self._starts[-1]

    def restorable_lengths(self) -> Iterator[int]:
        """All lengths in pages at which every pool has its window, the longest first."""
        windows = [(pages, partial(self._has, pool)) for pool, pages in self._attention_windows.items()]
        return restorable_lengths(self.pages, windows)

    def longest(self) -> int:
        """The longest restorable length in pages; 0: nothing."""
        return next(self.restorable_lengths(), 0)

    def key(self, page: int) -> bytes:
        number = bisect_right(self._starts, page) - 1
        span = self.spans[number]
        return span.run.keys[span.at + page - self._starts[number]]

    def trailing(self, pool: str, first: int, end: int) -> Iterator[tuple[int, PageRun, list[int]]]:
        """A pool's records of the pages from `first` to before `end`, by run: (shift, run, positions in the run).

        The page of a record is its position in the run less the shift.
        """
        for start, span in zip(self._starts, self.spans, strict=False):
            offsets = span.run.trailing.get(pool)
            if not offsets or start >= end or start + span.pages <= first:
                continue
            shift = span.at - start
            low, high = max(first, start) + shift, min(end, start + span.pages) + shift
            yield shift, span.run, sorted(at for at in offsets if low <= at < high)

    def window_start(self, pool: str, length: int) -> int:
        """The first page of the window of a prefix of `length` pages."""
        return window_start(self._attention_windows[pool], length)

    def _has(self, pool: str, page: int) -> bool:
        number = bisect_right(self._starts, page) - 1
        span = self.spans[number]
        return page - self._starts[number] + span.at in span.run.trailing.get(pool, ())
