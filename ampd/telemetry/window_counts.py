"""Counts of the last seconds, by any key. Memory is bounded by the window's length, however many events are counted."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

LENGTH_S = 60
"""The window of `ampd top`."""

Counts = Mapping[tuple[Any, ...], int]
"""Whole numbers by key, so that subtracting old ones leaves no rounding error."""


class WindowCounts:
    """Counts events second by second.

    The window is whole seconds: the one that runs and the `length_s` - 1 before it. Totals are kept as events come and
    seconds go, so that reading them costs the same however many events there were.
    """

    def __init__(self, length_s: int = LENGTH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.length_s = length_s
        self._clock = clock
        self._start_s = clock()
        self._seconds: deque[tuple[int, Counter[tuple[Any, ...]]]] = deque()
        self._total: Counter[tuple[Any, ...]] = Counter()

    def add(self, counts: Counts) -> None:
        """Count what has happened now."""
        number = self._advance()
        if not self._seconds or self._seconds[-1][0] != number:
            self._seconds.append((number, Counter()))
        for counter in (self._seconds[-1][1], self._total):
            for key, count in counts.items():
                counter[key] += count

    def read(self) -> Counter[tuple[Any, ...]]:
        """The sums of the window, for reading only."""
        self._advance()
        return self._total

    def span_s(self) -> float:
        """The part of the window in which this object existed; rates divide by it."""
        number, now_s = self._advance(), self._clock()
        return min(now_s - self._start_s, now_s - number + self.length_s - 1)

    def _advance(self) -> int:
        """The running second, after subtracting the seconds that have left the window."""
        # A clock that steps back must not reorder the seconds.
        number = max(int(self._clock()), self._seconds[-1][0] if self._seconds else 0)
        while self._seconds and self._seconds[0][0] <= number - self.length_s:
            for key, count in self._seconds.popleft()[1].items():
                self._total[key] -= count
                if not self._total[key]:
                    del self._total[key]
        return number
