"""Whether a figure of a process grows: a robust slope over the second half of a soak, against a stated bound.

The load moves most figures up and down. The half is divided into `WINDOWS` equal parts, and each gives its lowest value
and its mean. A leak lifts both. A process that is away for a moment lowers only the lowest values, and a burst of the
load raises only the means, so that the smaller one of their slopes counts.

A count that only comes back to what it had in the first half does not grow: connections are fewer while a part of the
graph restarts. So a count has a third measure: the highest mean of a window but one, above the typical mean of the
first half. A leak raises it by at least as much. Memory has no such measure, because it peaks at the start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from benchmarks.faults.inside import WITHOUT_KV

Point = tuple[float, float]
"""Seconds since the start, value."""

WINDOWS = 15
_MIB = 1 << 20
_LEAST_POINTS = 4
_LEAST_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a figure may grow over the second half: the sum of both."""

    absolute: float
    share: float

    def of(self, typical: float) -> float:
        return self.absolute + self.share * typical


MEMORY_BOUND = Bound(absolute=2.0 * _MIB, share=0.02)
TOKENS_BOUND = Bound(absolute=512.0, share=0.1)
COUNT_BOUND = Bound(absolute=1.0, share=0.05)

NIXL_PEERS = "NIXL peers"

NOT_JUDGED = ("PSS bytes", WITHOUT_KV, NIXL_PEERS, "keys request")
"""The share of memory depends on how many processes share it. A session without KV is forgotten after half an hour. The
peers of NIXL follow churn; those beyond the workers are judged. The names of requests live for a minute, so that their
number follows the load; keys without a lifetime are judged."""

UNSETTLED = ", while processes come and go"
"""End of the name of a figure that was taken while more or fewer processes served than at the start, or shortly after
one was replaced. It is not judged."""


def bound_of(figure: str) -> Bound | None:
    """None: the figure is not judged."""
    if figure in NOT_JUDGED or figure.endswith(UNSETTLED):
        return None
    if figure.endswith("bytes"):
        return MEMORY_BOUND
    return TOKENS_BOUND if figure.endswith("tokens") else COUNT_BOUND


@dataclass(frozen=True, slots=True)
class Trend:
    """A figure of one process over the second half.

    Attributes:
        typical, most: median and maximum.
        growth: slope of the lowest values or of the means times the length of the half, or of a count its rise
            above the first half, whichever is smallest.
        bound: the largest growth that counts as flat; None: not judged, as where too few samples could be.
    """

    process: str
    figure: str
    typical: float
    most: float
    growth: float
    bound: float | None

    @property
    def is_growing(self) -> bool:
        return self.bound is not None and self.growth > self.bound


def slope(points: Sequence[Point]) -> float:
    """Median of the slopes between all pairs of points (Theil-Sen): up to 29 % outliers do not move it."""
    return median(
        (later - earlier) / (later_s - earlier_s)
        for (earlier_s, earlier), (later_s, later) in combinations(points, 2)
        if later_s > earlier_s
    )


def windows(points: Sequence[Point], start_s: float, end_s: float) -> list[list[Point]]:
    """The points of each window between `start_s` and `end_s` that has any."""
    window_s = (end_s - start_s) / WINDOWS
    found: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        found[int((point[0] - start_s) / window_s)].append(point)
    return list(found.values())


def growth_of(points: Sequence[Point], start_s: float, end_s: float) -> float | None:
    """By how much the lowest values and the means of the windows both grow between `start_s` and `end_s`.

    None: too few windows have points.
    """
    found = windows(points, start_s, end_s)
    if len(found) < _LEAST_WINDOWS:
        return None
    lowest = [min(members, key=lambda point: point[1]) for members in found]
    means = [(fmean(at_s for at_s, _ in members), fmean(value for _, value in members)) for members in found]
    return min(slope(lowest), slope(means)) * (end_s - start_s)


def rise_of(points: Sequence[Point], start_s: float, half_s: float, end_s: float) -> float | None:
    """The highest mean of a window of the second half but one, above the median of the means of the first half.

    None: a half has too few windows with points.
    """
    first = windows([point for point in points if point[0] < half_s], start_s, half_s)
    second = windows([point for point in points if point[0] >= half_s], half_s, end_s)
    if min(len(first), len(second)) < _LEAST_WINDOWS:
        return None
    before, after = ([fmean(value for _, value in members) for members in half] for half in (first, second))
    return sorted(after)[-2] - median(before)


def trends(series: Mapping[tuple[str, str], Sequence[Point]], start_s: float, end_s: float) -> list[Trend]:
    """Of all figures of the processes that lived through the whole second half.

    Args:
        series: (process, figure) -> points in the order of time, between `start_s` and `end_s`.
    """
    half_s = (start_s + end_s) / 2
    tolerance_s = (end_s - start_s) / 10
    halves = {key: [point for point in points if point[0] >= half_s] for key, points in series.items()}
    lived = {
        process
        for (process, _), second in halves.items()
        if second and second[0][0] - half_s <= tolerance_s and end_s - second[-1][0] <= tolerance_s
    }
    found = []
    for (process, figure), second in halves.items():
        if process not in lived or len(second) < _LEAST_POINTS:
            continue
        values = [value for _, value in second]
        typical = median(values)
        growth = growth_of(second, half_s, end_s)
        bound = bound_of(figure) if growth is not None else None
        rise = rise_of(series[process, figure], start_s, half_s, end_s) if bound is COUNT_BOUND else None
        growth = min(growth, rise) if growth is not None and rise is not None else growth
        found.append(Trend(process, figure, typical, max(values), growth or 0.0, bound.of(typical) if bound else None))
    return found
