"""The search for the highest rate that a layout carries: which rate to try after those that were tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, sqrt

PRECISION = 1.05
"""The goodput and the next rate that fails are at most this factor apart."""
MOST_HEADROOM = 3.0
"""A search ends here, in units of its start: more reserve than that need not be known."""
_LEAST = 0.02
"""A search gives up below this, in units of its start."""
_FIRST_STEP = 1.1
"""Factor of the first step. One halving of it reaches the precision."""
_LONGEST_STEP = 1.6
SAME = 1.005
"""Rates that are less than this factor apart are one rate, because a difference between them would be chance. It is
smaller than the root of the finest precision, so a search between two rates always has room."""


def goodput(carried: Mapping[float, bool]) -> float:
    """The highest rate that is carried, among those below the lowest one that is not; 0: there is none."""
    failing = _lowest_failure(carried)
    return max((rate for rate, carries in carried.items() if carries and rate < failing), default=0.0)


def room(carried: Mapping[float, bool]) -> float:
    """How much more than the goodput may be carried: as far as the lowest rate that fails; 0 if there is none."""
    failing = _lowest_failure(carried)
    return failing - goodput(carried) if failing < inf else 0.0


def is_least(carried: Mapping[float, bool]) -> bool:
    """Whether the goodput is only the least that is carried, because no rate above it was tried that fails."""
    return goodput(carried) > 0 and _lowest_failure(carried) == inf


def next_rate(
    carried: Mapping[float, bool], start: float, precision: float = PRECISION, tried: Iterable[float] = ()
) -> float | None:
    """The next rate to try; None: the goodput is known.

    Args:
        carried: the rates that were tried, and whether they are carried.
        start: a rate that is about right, which is tried first.
        tried: rates that were tried with other seeds. One that is about right is used again.
    """
    low, high = goodput(carried), _lowest_failure(carried)
    rate = _next(low, high, start, precision)
    if rate is None:
        return None
    same = [each for each in tried if low * SAME < each < high / SAME and rate / SAME < each < rate * SAME]
    return min(same, key=lambda each: abs(each - rate), default=rate)


def _next(low: float, high: float, start: float, precision: float) -> float | None:
    """As `next_rate`. `low`: the goodput so far; `high`: the lowest rate that is not carried."""
    if low * SAME < start < high / SAME:
        return start
    if high == inf:
        step = min(_FIRST_STEP * max(low / start, 1.0), _LONGEST_STEP)
        return low * step if low < MOST_HEADROOM * start else None
    if not low:
        return high / (_FIRST_STEP * max(start / high, 1.0)) if high > _LEAST * start else None
    return sqrt(low * high) if high / low > precision else None


def _lowest_failure(carried: Mapping[float, bool]) -> float:
    # Attainment is noisy. A rate that holds above one that fails does not count.
    return min((rate for rate, carries in carried.items() if not carries), default=inf)
