"""Which lengths of a prefix can be restored, where some pools have records of a few pages only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from workers.kv.store.runs import Run, Span


class PrefixRecords:
    """The records of a stored prefix.

    Args:
        spans: of the prefix, in order.
        windows: pool -> pages before a prefix's end of which the pool needs the record; 0: of every page. The pool that
            has a record of every page is left out.
    """

    def __init__(self, spans: Sequence[Span], windows: Mapping[str, int]) -> None:
        self._windows = windows
        self.spans = spans
        self._starts = [0]
        for span in spans:
            self._starts.append(self._starts[-1] + span.pages)
        self.pages = self._starts[-1]

    def restorable_lengths(self) -> Iterator[int]:
        """All lengths in pages at which every pool has its window, the longest first."""
        length = self.pages
        there_from = dict.fromkeys(self._windows, length)
        while length:
            hole = max((self._hole(pool, there_from, length) for pool in self._windows), default=-1)
            if hole < 0:
                yield length
            # The hole also lies in the windows of all the lengths between.
            length = hole if hole >= 0 else length - 1
            there_from = {pool: min(start, length) for pool, start in there_from.items()}

    def longest(self) -> int:
        """The longest restorable length in pages; 0: nothing."""
        return next(self.restorable_lengths(), 0)

    def trailing(self, pool: str, first: int, end: int) -> Iterator[tuple[int, Run, list[int]]]:
        """A pool's records of the pages from `first` to before `end`, by run: (shift, run, positions in the run).

        A record's page is its position less the shift.
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
        return max(0, length - (self._windows[pool] or length))

    def _hole(self, pool: str, there_from: dict[str, int], length: int) -> int:
        """The last page without a record in the window of a prefix of `length` pages; -1: the window is complete.

        `there_from`: from this page to `length`, all records are known to be there. It is brought up to date.
        """
        start = self.window_start(pool, length)
        while there_from[pool] > start:
            if not self._has(pool, there_from[pool] - 1):
                return there_from[pool] - 1
            there_from[pool] -= 1
        return -1

    def _has(self, pool: str, page: int) -> bool:
        number = bisect_right(self._starts, page) - 1
        span = self.spans[number]
        return page - self._starts[number] + span.at in span.run.trailing.get(pool, ())
