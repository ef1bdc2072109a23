"""Figures over seeds: a mean with its interval, within what is possible."""

from __future__ import annotations

import pytest

from planner.layout.appraisal import Figure


def test_an_interval_needs_two_seeds_and_stays_within_what_is_possible() -> None:
    assert Figure.of([0.9]) == Figure(0.9, None, None, 1)
    figure = Figure.of([0.98, 1.0, 0.99], 1.0)
    assert figure.mean == pytest.approx(0.99)
    assert figure.high == 1.0
    assert figure.low is not None
    assert 0.9 < figure.low < 0.99
    assert Figure.of([0.0, 0.1, 0.2]).low == 0.0
    gain = Figure.of([0.0, 0.1, 0.2], least=None)
    assert gain.low is not None
    assert gain.low < 0.0


def test_a_gain_may_be_negative() -> None:
    figure = Figure.of([-0.2, -0.1, -0.3])
    assert figure.mean == pytest.approx(-0.2)
    assert figure.low is not None
    assert figure.low <= figure.mean
