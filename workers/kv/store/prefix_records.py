"""The records of a stored prefix, and which lengths of it can be restored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from workers.kv.restorable import restorable_lengths, window_start
from workers.kv.store.runs import PageRun, PageSpan


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
