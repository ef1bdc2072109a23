"""Confidence intervals of means."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.intervals import mean_interval


def test_a_confidence_interval_is_students() -> None:
    # The table's quantile for four degrees of freedom and 95 % is 2.776.
    mean, half, seeds = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, seeds) == (3.0, 5)
    assert half == pytest.approx(2.776 * (2.5**0.5) / 5**0.5, rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([2.0]) == (2.0, inf, 1)
