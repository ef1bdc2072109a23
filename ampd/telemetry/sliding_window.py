"""A sliding window of durations with its mean, O(1) amortised: a worker's TTFTs or ITLs of the last seconds."""

from __future__ import annotations

from collections import deque
from math import inf

from ampd.types import WINDOW_S, Window

_NS = 1_000_000_000


class SlidingWindow:
    """Samples of the last `length_s` seconds, on the clock of the `now_s` that the caller passes in.

    Sums are whole nanoseconds: adding and subtracting floats for days would drift.
    """

    def __init__(self, length_s: float = WINDOW_S) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, int, int]] = deque()
        self._sum_ns = 0
        self._count = 0
        self._now_s = -inf
        self._oldest_s = inf  # when the oldest sample was seen

    def add(self, value_s: float, now_s: float, count: int = 1) -> None:
        """Enter `count` samples whose mean is `value_s`, seen at `now_s`."""
        if count <= 0:
            return
        now_s = self._advance(now_s)
        total_ns = round(value_s * count * _NS)
        if not self._samples:
            self._oldest_s = now_s
        self._samples.append((now_s, total_ns, count))
        self._sum_ns += total_ns
        self._count += count

    def read(self, now_s: float) -> Window:
        """Mean and number of the samples that are younger than the window's length; (0, 0) when there are none."""
        self._advance(now_s)
        if not self._count:
            return Window()
        return Window(mean_s=self._sum_ns / self._count / _NS, count=self._count)

    def changes_at_s(self) -> float:
        """When the oldest sample leaves the window, if nothing is added; infinity when it is empty."""
        return self._oldest_s + self._length_s

    def _advance(self, now_s: float) -> float:
        # a caller's clock that steps back must not revive or misorder samples
        self._now_s = max(self._now_s, now_s)
        horizon_s = self._now_s - self._length_s
        while self._oldest_s <= horizon_s and self._samples:
            _, total_ns, count = self._samples.popleft()
            self._sum_ns -= total_ns
            self._count -= count
            self._oldest_s = self._samples[0][0] if self._samples else inf
        return self._now_s
