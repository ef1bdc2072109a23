"""The rounds of the last minute, second by second: what a coordinator tells those who look on (`ampd top`)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ampd.latencies import Latencies, bucket_of
from ampd.metrics import names
from ampd.metrics.values import Words
from ampd.served_window import ServedWindow, merged
from router.served import ServedRound

LENGTH_S = 60

_MET_TTFT = (names.MET, names.MISSED_ITL)
_MET_ITL = (names.MET, names.MISSED_TTFT)


@dataclass(slots=True)
class _Latencies:
    total_s: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, value_s: float) -> None:
        self.total_s += value_s
        self.buckets[bucket_of(value_s)] += 1

    def read(self) -> Latencies:
        return Latencies(self.total_s, self.buckets)


@dataclass(slots=True)
class _Second:
    """What ended within one second of the clock."""

    number: int
    outcomes: Counter[str] = field(default_factory=Counter)
    routes: Counter[tuple[str, str]] = field(default_factory=Counter)
    output_tokens: int = 0
    sessions_bound: int = 0
    sessions_repinned: int = 0
    ttft_initial: _Latencies = field(default_factory=_Latencies)
    ttft_incremental: _Latencies = field(default_factory=_Latencies)
    itl: _Latencies = field(default_factory=_Latencies)

    def read(self) -> ServedWindow:
        return ServedWindow(
            rounds=self.outcomes.total(),
            abandoned=self.outcomes[names.ABANDONED],
            failed=self.outcomes[names.FAILED],
            met=self.outcomes[names.MET],
            met_ttft=sum(self.outcomes[outcome] for outcome in _MET_TTFT),
            met_itl=sum(self.outcomes[outcome] for outcome in _MET_ITL),
            output_tokens=self.output_tokens,
            sessions_bound=self.sessions_bound,
            sessions_repinned=self.sessions_repinned,
            routes=self.routes,
            ttft_initial=self.ttft_initial.read(),
            ttft_incremental=self.ttft_incremental.read(),
            itl=self.itl.read(),
        )


class RoundWindow:
    """Counts rounds: an `Observer`. Its memory is bounded by its length, however many rounds end.

    The window is whole seconds: the one that runs and the `length_s` - 1 before it.
    """

    def __init__(self, length_s: int = LENGTH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._length_s = length_s
        self._clock = clock
        self._start_s = clock()
        self._reasons = Words()
        self._seconds: deque[_Second] = deque()

    def __call__(self, served: ServedRound) -> None:
        """Count one round."""
        second, record = self._current(), served.record
        second.outcomes[served.outcome] += 1
        second.routes[record.route, self._reasons(record.reason)] += 1
        second.output_tokens += served.output_tokens
        if served.ttft_s is not None:
            (second.ttft_initial if served.is_initial else second.ttft_incremental).add(served.ttft_s)
        if served.itl_s is not None:
            second.itl.add(served.itl_s)

    def add_sessions(self, bound: int, repinned: int) -> None:
        """Count sessions that were bound, and moved to another decode worker, just now."""
        second = self._current()
        second.sessions_bound += bound
        second.sessions_repinned += repinned

    def read(self) -> ServedWindow:
        """What ended within the window."""
        running = self._current().number
        before_s = self._clock() - running + self._length_s - 1
        span_s = min(self._clock() - self._start_s, before_s)
        parts = [ServedWindow(length_s=self._length_s, span_s=span_s), *(second.read() for second in self._seconds)]
        return merged(parts)

    def _current(self) -> _Second:
        # a clock that steps back must not reorder the seconds
        number = max(int(self._clock()), self._seconds[-1].number if self._seconds else 0)
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        while self._seconds[0].number <= number - self._length_s:
            self._seconds.popleft()
        return self._seconds[-1]
