"""Which lengths of a prefix can be restored, where some pools have records of a few pages only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

PageWindow = tuple[int, Callable[[int], bool]]
"""Of a pool: the pages before the end of a prefix whose records it needs (0: every page), and whether it has one."""


def restorable_lengths(pages: int, attention_windows: Sequence[PageWindow]) -> Iterator[int]:
    """All lengths in pages, up to `pages`, at which every pool has its window; the longest first."""
    length = pages
    there_from = [length] * len(attention_windows)
    while length:
        holes = (_hole(window, there_from, number, length) for number, window in enumerate(attention_windows))
        hole = max(holes, default=-1)
        if hole < 0:
            yield length
        # The hole also lies in the windows of all the lengths between.
        length = hole if hole >= 0 else length - 1
        there_from = [min(start, length) for start in there_from]


def window_start(window_pages: int, length: int) -> int:
    """The first page of the window of a prefix of `length` pages."""
    return max(0, length - (window_pages or length))


def _hole(window: PageWindow, there_from: list[int], number: int, length: int) -> int:
    """The last page without a record in the window of a prefix of `length` pages; -1: the window is complete.

    `there_from`: from this page to `length`, all records are known to be there. It is brought up to date.
    """
    window_pages, has = window
    start = window_start(window_pages, length)
    while there_from[number] > start:
        if not has(there_from[number] - 1):
            return there_from[number] - 1
        there_from[number] -= 1
    return -1
