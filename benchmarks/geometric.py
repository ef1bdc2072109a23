"""Geometric means of ratios, with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
from statistics import fmean

from benchmarks.intervals import mean_interval


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
