"""The rounds of the last minute, second by second, which a coordinator publishes for `ampd top`."""

from __future__ import annotations

import time
from collections.abc import Callable

from ampd.telemetry.metrics.exposition import LabelValues
from ampd.telemetry.windows import LENGTH_S, WindowCounts, latency_counts, microseconds
from ampd.types import ServedWindow
from router.served import ServedRound


class RoundWindow:
    """Counts rounds: an `Observer`. Its memory is bounded by its length, however many rounds end."""

    def __init__(self, length_s: int = LENGTH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = WindowCounts(length_s, clock)
        self._reasons = LabelValues()

    def __call__(self, served: ServedRound) -> None:
        decided = served.record.decided
        counts = {
            f"outcome {served.outcome}": 1,
            f"route {decided.route} {self._reasons(decided.reason)}": 1,
            "output_tokens": served.output_tokens,
            "ttft_targets_us": microseconds(served.slo.ttft_s),
            "itl_targets_us": microseconds(served.slo.itl_s),
        }
        if served.ttft_s is not None:
            counts |= latency_counts("ttft_initial" if served.is_initial else "ttft_incremental", served.ttft_s)
        if served.itl_s is not None:
            counts |= latency_counts("itl", served.itl_s)
        self._counts.add(counts)

    def add_sessions(self, bound: int, moved: int) -> None:
        """Count sessions that have just been bound, or moved to another decode worker."""
        self._counts.add({"bound": bound, "moved": moved})

    def add_refused(self) -> None:
        """Count a round that was refused because of load."""
        self._counts.add({"refused": 1})

    def add_unnamed(self) -> None:
        """Count a round whose client named no session."""
        self._counts.add({"unnamed": 1})

    def read(self) -> ServedWindow:
        """The rounds that ended within the window."""
        return ServedWindow(self._counts.span_s(), dict(self._counts.read()))
