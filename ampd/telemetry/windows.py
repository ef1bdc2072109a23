"""Sliding windows: the mean of the latencies of the last seconds, and counts of events."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

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


# -- Counts of the last seconds, by words, so that those of several processes add up
#
# Memory is bounded by the window's length, however many events are counted. Latencies are counted in buckets that grow
# by a fixed factor, beside their exact sum.

LENGTH_S = 60
"""The window of `ampd top`."""

US = 1_000_000
"""Sums of seconds are whole microseconds, so that subtracting old ones leaves no rounding error."""

ERROR = 0.01
"""Largest relative error of a quantile (buckets as in DDSketch, Masson et al., VLDB 2019)."""

_GROWTH = (1 + ERROR) / (1 - ERROR)
_LOG_GROWTH = math.log(_GROWTH)
_LEAST_S, _MOST_S = 1e-6, 1e5
_BUCKET = re.compile(r"-?\d{1,4}", re.ASCII)
_PERCENTILES = (50, 95, 99)


class WindowCounts:
    """Counts events second by second.

    The window is whole seconds: the one that runs and the `length_s` - 1 before it. Totals are kept as events come and
    seconds go, so that reading them costs the same however many events there were.
    """

    def __init__(self, length_s: int = LENGTH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.length_s = length_s
        self._clock = clock
        self._start_s = clock()
        self._seconds: deque[tuple[int, Counter[str]]] = deque()
        self._total: Counter[str] = Counter()

    def add(self, counts: Mapping[str, int]) -> None:
        """Count what has happened now."""
        number = self._advance()
        if not self._seconds or self._seconds[-1][0] != number:
            self._seconds.append((number, Counter()))
        for counter in (self._seconds[-1][1], self._total):
            for key, count in counts.items():
                counter[key] += count

    def read(self) -> Counter[str]:
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


def latency_counts(kind: str, value_s: float) -> dict[str, int]:
    """A latency as counts: its bucket and its microseconds."""
    return {f"{kind} {bucket_of(value_s)}": 1, f"{kind} us": microseconds(value_s)}


def microseconds(value_s: float) -> int:
    """A time to add up. More than 100,000 s count as 100,000 s, so that a sum stays a number that others can read."""
    return round(min(value_s, _MOST_S) * US)


def bucket_of(value_s: float) -> int:
    """The bucket of a latency. Latencies below one microsecond count as one microsecond."""
    return math.ceil(math.log(min(max(value_s, _LEAST_S), _MOST_S)) / _LOG_GROWTH)


def latency_summary(counts: Mapping[str, int], kind: str) -> dict[str, Any]:
    """`count`, `mean`, `p50`, `p95` and `p99` of the latencies of a kind, in seconds; None without any.

    The mean is exact to a microsecond. A quantile is off by `ERROR` at most.
    """
    named = [(key.removeprefix(f"{kind} "), count) for key, count in counts.items() if key.startswith(f"{kind} ")]
    buckets = sorted((int(bucket), count) for bucket, count in named if _BUCKET.fullmatch(bucket))
    total = sum(count for _, count in buckets)
    quantiles = {f"p{percent}": _quantile_s(buckets, total, percent / 100) for percent in _PERCENTILES}
    return {"count": total, "mean": counts.get(f"{kind} us", 0) / US / total if total else None, **quantiles}


def _quantile_s(buckets: list[tuple[int, int]], total: int, share: float) -> float | None:
    """The latency that `share` (0 to 1) of them do not exceed. `buckets`: sorted."""
    rank, seen = max(math.ceil(share * total), 1), 0
    for bucket, count in buckets:
        seen += count
        if seen >= rank:
            return float(2 * _GROWTH**bucket / (_GROWTH + 1))
    return None
