"""Compact latency histograms: buckets grow by a fixed factor, so histograms of several processes can be added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from ampd.types import Count, Seconds

ERROR = 0.01
"""Largest relative error of a quantile (buckets as in DDSketch, Masson et al., VLDB 2019)."""

_GROWTH = (1 + ERROR) / (1 - ERROR)
_LOG_GROWTH = math.log(_GROWTH)
_LEAST_S, _MOST_S = 1e-6, 1e6

Bucket = Annotated[int, Meta(ge=-10_000, le=10_000)]
"""The buckets of a microsecond and of 11 days are within 700 of 0."""


def bucket_of(value_s: float) -> int:
    """The bucket of a latency. Latencies below one microsecond count as one microsecond."""
    return math.ceil(math.log(min(max(value_s, _LEAST_S), _MOST_S)) / _LOG_GROWTH)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies as counts by bucket.

    Attributes:
        total_s: their exact sum in seconds.
        buckets: bucket -> number of latencies in it.
    """

    total_s: Seconds = 0.0
    buckets: Mapping[Bucket, Count] = field(default_factory=dict)

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Latencies:
        total_s, buckets = 0.0, dict[int, int]()
        for value_s in values_s:
            total_s += value_s
            bucket = bucket_of(value_s)
            buckets[bucket] = buckets.get(bucket, 0) + 1
        return cls(total_s, buckets)

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    @property
    def mean_s(self) -> float | None:
        """Their exact mean; None without any."""
        count = self.count
        return self.total_s / count if count else None

    def quantile_s(self, share: float) -> float | None:
        """The latency that `share` (0 to 1) of them do not exceed, to within `ERROR`; None without any."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= max(rank, 1):
                return float(2 * _GROWTH**bucket / (_GROWTH + 1))
        return None


def merged(parts: Iterable[Latencies]) -> Latencies:
    total_s, buckets = 0.0, dict[int, int]()
    for part in parts:
        total_s += part.total_s
        for bucket, count in part.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + count
    return Latencies(total_s, buckets)
