"""Means with their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from planner.layout.candidate import half_width


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval by Student's t; infinite with a single value.

    `seeds`: how many values.
    """

    mean: float
    half: float
    seeds: int


def mean_interval(values: Sequence[float]) -> Interval:
    """Of independent values that are about normal, as results of seeds."""
    return Interval(fmean(values), half_width(values), len(values))
