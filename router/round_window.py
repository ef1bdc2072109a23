"""The rounds of the last minute, second by second, which a coordinator publishes for `ampd top`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from ampd.telemetry.metrics.exposition import LabelValues
from ampd.telemetry.windows import LENGTH_S, WindowCounts, latency_counts, microseconds
from ampd.types import ServedWindow
from router.decision_record import DecisionRecord


class Counts(Counter[str]):
    """Events since the start of the process: sessions `bound` and `moved`, rounds `refused` and `unnamed`.

    Attributes:
        on_add: called with each event.
    """

    on_add: Callable[[Mapping[str, int]], None] = staticmethod(lambda _: None)

    def add(self, event: str) -> None:
        self[event] += 1
        self.on_add({event: 1})


class RoundWindow:
    """Counts rounds: an `Observer`. Its memory is bounded by its length, however many rounds end."""

    def __init__(self, length_s: int = LENGTH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = WindowCounts(length_s, clock)
        self._reasons = LabelValues()

    def __call__(self, record: DecisionRecord) -> None:
        counts = {
            f"outcome {record.outcome}": 1,
            f"route {record.route} {self._reasons(record.reason)}": 1,
            "output_tokens": record.output_tokens,
            "ttft_targets_us": microseconds(record.slo.ttft_s),
            "itl_targets_us": microseconds(record.slo.itl_s),
        }
        if record.ttft_s is not None:
            counts |= latency_counts("ttft_initial" if record.is_initial else "ttft_incremental", record.ttft_s)
        if record.itl_s is not None:
            counts |= latency_counts("itl", record.itl_s)
        self._counts.add(counts)

    def add(self, events: Mapping[str, int]) -> None:
        """Count what has just happened, see `Counts`."""
        self._counts.add(events)

    def read(self) -> ServedWindow:
        """The rounds that ended within the window."""
        return ServedWindow(self._counts.span_s(), dict(self._counts.read()))
