"""The rounds of the last minute, second by second, which a coordinator publishes for `ampd top`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ampd.telemetry.latencies import Latencies, bucket_of
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import LabelValues
from ampd.telemetry.served_window import ServedWindow
from ampd.telemetry.window_counts import LENGTH_S, WindowCounts
from router.served import ServedRound

_MET_TTFT = (names.MET, names.MISSED_ITL)
_MET_ITL = (names.MET, names.MISSED_TTFT)
_NS = 1_000_000_000

_OUTCOME, _ROUTE, _OUTPUT_TOKENS, _BOUND, _MOVED = "outcome", "route", "output_tokens", "bound", "moved"
_REFUSED = "refused"
_UNNAMED = "unnamed"
_TTFT_TARGETS, _ITL_TARGETS = "ttft_targets", "itl_targets"
_TTFT_INITIAL, _TTFT_INCREMENTAL, _ITL = "ttft_initial", "ttft_incremental", "itl"

_Key = tuple[Any, ...]
"""A count: (`outcome`, value), (`route`, route, reason), (`itl`, bucket), or (`itl`,) for the sum of the latencies in
integer nanoseconds, as those of the targets are."""


class RoundWindow:
    """Counts rounds: an `Observer`. Its memory is bounded by its length, however many rounds end."""

    def __init__(self, length_s: int = LENGTH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts = WindowCounts(length_s, clock)
        self._reasons = LabelValues()

    def __call__(self, served: ServedRound) -> None:
        record = served.record
        counts: dict[_Key, int] = {
            (_OUTCOME, served.outcome): 1,
            (_ROUTE, record.decided.route, self._reasons(record.decided.reason)): 1,
            (_OUTPUT_TOKENS,): served.output_tokens,
            (_TTFT_TARGETS,): round(served.slo.ttft_s * _NS),
            (_ITL_TARGETS,): round(served.slo.itl_s * _NS),
        }
        if served.ttft_s is not None:
            counts |= _latency(_TTFT_INITIAL if served.is_initial else _TTFT_INCREMENTAL, served.ttft_s)
        if served.itl_s is not None:
            counts |= _latency(_ITL, served.itl_s)
        self._counts.add(counts)

    def add_sessions(self, bound: int, moved: int) -> None:
        """Count sessions that have just been bound, or moved to another decode worker."""
        self._counts.add({(_BOUND,): bound, (_MOVED,): moved})

    def add_refused(self) -> None:
        """Count a round that was refused because of load."""
        self._counts.add({(_REFUSED,): 1})

    def add_unnamed(self) -> None:
        """Count a round whose client named no session."""
        self._counts.add({(_UNNAMED,): 1})

    def read(self) -> ServedWindow:
        """The rounds that ended within the window."""
        total = self._counts.read()
        outcomes = {outcome: total[_OUTCOME, outcome] for outcome in names.OUTCOMES}
        return ServedWindow(
            length_s=self._counts.length_s,
            span_s=self._counts.span_s(),
            rounds=sum(outcomes.values()),
            abandoned=outcomes[names.ABANDONED],
            failed=outcomes[names.FAILED],
            met=outcomes[names.MET],
            met_ttft=sum(outcomes[outcome] for outcome in _MET_TTFT),
            met_itl=sum(outcomes[outcome] for outcome in _MET_ITL),
            refused=total[_REFUSED,],
            unnamed=total[_UNNAMED,],
            output_tokens=total[_OUTPUT_TOKENS,],
            sessions_bound=total[_BOUND,],
            sessions_repinned=total[_MOVED,],
            ttft_targets_s=total[_TTFT_TARGETS,] / _NS,
            itl_targets_s=total[_ITL_TARGETS,] / _NS,
            routes={f"{key[1]} {key[2]}": count for key, count in total.items() if key[0] == _ROUTE},
            ttft_initial=_latencies(total, _TTFT_INITIAL),
            ttft_incremental=_latencies(total, _TTFT_INCREMENTAL),
            itl=_latencies(total, _ITL),
        )


def _latencies(total: Counter[_Key], kind: str) -> Latencies:
    buckets = {key[1]: count for key, count in total.items() if key[0] == kind and len(key) > 1}
    return Latencies(total[kind,] / _NS, buckets)


def _latency(kind: str, value_s: float) -> dict[_Key, int]:
    return {(kind, bucket_of(value_s)): 1, (kind,): round(value_s * _NS)}
