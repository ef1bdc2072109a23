"""Confidence intervals of means and of ratios."""

from __future__ import annotations

from math import inf

import pytest

from planner.intervals import geometric_interval, geometric_mean, mean_interval


def test_a_confidence_interval_is_students() -> None:
    # The table's quantile for four degrees of freedom and 95 % is 2.776.
    mean, half, seeds = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, seeds) == (3.0, 5)
    assert half == pytest.approx(2.776 * (2.5**0.5) / 5**0.5, rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([2.0]) == (2.0, inf, 1)
    assert geometric_interval([2.0]) == (pytest.approx(2.0), 0.0, inf)


def test_a_ratios_interval_is_symmetric_in_its_inverse() -> None:
    mean, low, high = geometric_interval([1.0, 2.0, 4.0])
    back, back_low, back_high = geometric_interval([1.0, 0.5, 0.25])
    assert mean == pytest.approx(2.0)
    assert (1 / back, 1 / back_high, 1 / back_low) == (pytest.approx(mean), pytest.approx(low), pytest.approx(high))


def test_a_geometric_mean_of_a_zero_is_zero() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([0.0, 4.0]) == 0.0
