"""The sliding window of a decode worker's ITLs, over runs of steps instead of single tokens.

It gives the same values as `ampd.telemetry.sliding_window.SlidingWindow` with every token's gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from ampd.types import Window
from planner.simulator.outcome import GapRun
from planner.simulator.steps import steps_s, steps_within

_Entry = tuple[float, GapRun]
"""(end of the run's first step, the run)."""

_EMPTY = Window()


class GapWindow:
    """Gaps between tokens that ended in the last `length_s` seconds."""

    __slots__ = ("_count", "_entries", "_length_s", "_oldest_s", "_sum_s")

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._entries: deque[_Entry] = deque()
        self._oldest_s = inf  # when the first step of the oldest entry ended
        self._sum_s = 0.0
        self._count = 0

    def add(self, first_end_s: float, run: GapRun) -> None:
        """Enter a finished run whose first step ended at `first_end_s`; runs come in the order of their ends."""
        if not self._entries:
            self._oldest_s = first_end_s
        self._entries.append((first_end_s, run))
        self._sum_s += _sum_s(run)
        self._count += run.steps * run.batch

    def read(self, now_s: float, unfinished: Sequence[_Entry] = ()) -> Window:
        """Mean and number of the gaps in the window; of `unfinished` runs, the finished steps count."""
        horizon_s = now_s - self._length_s
        self._drop(horizon_s)
        sum_s, count = self._sum_s, self._count
        for entry in unfinished:
            if (rest := _after(entry, horizon_s)) is not None:
                sum_s += _sum_s(rest[1])
                count += rest[1].steps * rest[1].batch
        return Window(sum_s / count, count) if count else _EMPTY

    def _drop(self, horizon_s: float) -> None:
        if self._oldest_s > horizon_s:
            return
        entries = self._entries
        while entries and entries[0][0] <= horizon_s:
            entry = entries.popleft()
            self._sum_s -= _sum_s(entry[1])
            self._count -= entry[1].steps * entry[1].batch
            rest = _after(entry, horizon_s)
            if rest is not None:
                entries.appendleft(rest)
                self._sum_s += _sum_s(rest[1])
                self._count += rest[1].steps * rest[1].batch
        self._oldest_s = entries[0][0] if entries else inf
        if not entries:
            self._sum_s = 0.0


def _sum_s(run: GapRun) -> float:
    return steps_s(run.first_s, run.growth_s, run.steps) * run.batch


def _after(entry: _Entry, horizon_s: float) -> _Entry | None:
    """The part of a run that ended after the horizon."""
    first_end_s, run = entry
    if first_end_s > horizon_s:
        return entry
    # The first step ended before the horizon, and perhaps some steps behind it.
    second_s = run.first_s + run.growth_s
    gone = 1 + (steps_within(second_s, run.growth_s, horizon_s - first_end_s) if run.steps > 1 else 0)
    if gone >= run.steps:
        return None
    rest = GapRun(run.first_s + gone * run.growth_s, run.growth_s, run.steps - gone, run.batch)
    return first_end_s + steps_s(second_s, run.growth_s, gone), rest
