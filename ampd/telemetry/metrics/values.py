"""Counters and histograms as plain numbers: cheap enough to update within a round's own task.

`prometheus_client` only formats them (`ampd.telemetry.metrics.exposition`). Its own counters take their storage from
the environment at import, which SGLang changes when it starts, and a lock at each use.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import product

from ampd.telemetry.metrics.names import OTHER, Kind, Metric

_WORD = re.compile(r"[a-z]+(?:-[a-z]+)*")
_MOST_WORDS = 64
_LONGEST_WORD = 64


class LabelValues:
    """Bounds the values of one label: plain words with hyphens, up to `most`. All other texts become `other`."""

    def __init__(self, most: int = _MOST_WORDS) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, text: str) -> str:
        if text in self._known:
            return text
        if len(self._known) >= self._most or len(text) > _LONGEST_WORD or not _WORD.fullmatch(text):
            return OTHER
        self._known.add(text)
        return text


class Counter:
    """A counter with its labels in the metric's order. Combinations that are known beforehand start at zero."""

    def __init__(self, metric: Metric) -> None:
        assert metric.kind is Kind.COUNTER
        self.metric = metric
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(product(*metric.labels.values()), 0.0)

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def read(self) -> list[tuple[tuple[str, ...], float]]:
        """All values by labels."""
        return list(self._values.items())


class Histogram:
    """A histogram with its labels in the metric's order. Combinations that are known beforehand start empty."""

    def __init__(self, metric: Metric) -> None:
        assert metric.kind is Kind.HISTOGRAM
        self.metric = metric
        self._bounds = metric.buckets
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        for labels in product(*metric.labels.values()):
            self._start(labels)

    def observe(self, value: float, *labels: str, count: int = 1) -> None:
        """Enter `count` observations of `value`."""
        counts = self._counts.get(labels) or self._start(labels)
        counts[bisect_left(self._bounds, value)] += count
        self._sums[labels] += value * count

    def read(self) -> list[tuple[tuple[str, ...], list[int], float]]:
        """By labels: observations in each bucket (not cumulated; the last one has no upper bound), and their sum."""
        return [(labels, list(counts), self._sums[labels]) for labels, counts in list(self._counts.items())]

    def _start(self, labels: tuple[str, ...]) -> list[int]:
        self._sums[labels] = 0.0
        counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
        return counts
