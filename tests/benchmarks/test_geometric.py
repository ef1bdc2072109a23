"""Geometric means, and confidence intervals of ratios."""

from __future__ import annotations

import pytest

from benchmarks.geometric import geometric_interval, geometric_mean


def test_one_ratio_has_no_interval() -> None:
    assert geometric_interval([2.0]) == (pytest.approx(2.0), 0.0, float("inf"))


def test_a_ratios_interval_is_symmetric_in_its_inverse() -> None:
    mean, low, high = geometric_interval([1.0, 2.0, 4.0])
    back, back_low, back_high = geometric_interval([1.0, 0.5, 0.25])
    assert mean == pytest.approx(2.0)
    assert (1 / back, 1 / back_high, 1 / back_low) == (pytest.approx(mean), pytest.approx(low), pytest.approx(high))


def test_a_geometric_mean_of_a_zero_is_zero() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([0.0, 4.0]) == 0.0
