"""The search for the highest rate that a layout carries: which rate to try after those that were tried."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt

_LEAST = 0.02
"""A search gives up below this, in units of its start."""
_FIRST_STEP, _LONGEST_STEP = 1.1, 1.6
"""Factors by which the rate is raised or lowered until one rate is carried and a higher one is not."""
_SAME = 1.005
"""Rates that are less than this factor apart are one rate, because a difference between them would be chance."""


def goodput(carried: Mapping[float, bool]) -> float:
    """The highest rate that is carried, among those below the lowest one that is not; 0: there is none."""
    failing = _lowest_failure(carried)
    return max((rate for rate, carries in carried.items() if carries and rate < failing), default=0.0)


def next_rate(carried: Mapping[float, bool], start: float, most: float, precision: float) -> float | None:
    """The next rate to try; None: the goodput is known.

    Args:
        carried: the rates that were tried, and whether they are carried.
        start: a rate that is about right, which is tried first.
        most: higher rates are not tried, because no layout of this kind carries them.
        precision: the goodput and the next rate that fails are at most this factor apart.
    """
    low, high = goodput(carried), _lowest_failure(carried)
    if low * _SAME < start < high / _SAME:
        return start
    if high == inf:
        rate = low * min(_FIRST_STEP * max(low / start, 1.0), _LONGEST_STEP)
        return rate if rate <= most else None
    if not low:
        return high / (_FIRST_STEP * max(start / high, 1.0)) if high > _LEAST * start else None
    return sqrt(low * high) if high / low > precision else None


def _lowest_failure(carried: Mapping[float, bool]) -> float:
    # Attainment is noisy. A rate that holds above one that fails does not count.
    return min((rate for rate, carries in carried.items() if not carries), default=inf)
