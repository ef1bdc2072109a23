"""Means with their confidence intervals, and geometric means."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtrit

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval by Student's t; infinite with a single value.

    `seeds`: how many values.
    """

    mean: float
    half: float
    seeds: int


def mean_interval(values: Sequence[float]) -> Interval:
    """Of independent values that are about normal, as results of seeds.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("no values")
    count = len(values)
    if count == 1:
        return Interval(values[0], inf, 1)
    quantile = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2))
    return Interval(fmean(values), quantile * stdev(values) / sqrt(count), count)


def geometric_mean(values: Sequence[float]) -> float:
    """0 if one of them is 0.

    Raises:
        ValueError: no value, or a negative one.
    """
    if not values or min(values) < 0:
        raise ValueError(f"no geometric mean of {list(values)}")
    return exp(fmean(map(log, values))) if min(values) else 0.0


def geometric_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(geometric mean, lower, upper end of its 95 % interval) of positive ratios: Student's t on their logarithms."""
    mean, half, _ = mean_interval([log(ratio) for ratio in ratios])
    return exp(mean), exp(mean - half) if half < inf else 0.0, exp(mean + half) if half < inf else inf
