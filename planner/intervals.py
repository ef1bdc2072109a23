"""Means with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, sqrt
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


def mean_interval(values: Sequence[float], error: float = 0.0) -> Interval:
    """Of independent values that are about normal, as results of seeds.

    `error`: a further standard deviation of each value. Values that are known by the steps of a grid need it, because
    they may be equal by the steps alone.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("no values")
    count = len(values)
    if count == 1:
        return Interval(values[0], inf, 1)
    quantile = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2))
    return Interval(fmean(values), quantile * hypot(stdev(values), error) / sqrt(count), count)
