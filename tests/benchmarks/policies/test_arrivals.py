"""Recorded arrivals: the wanted rate, and a place in the recording by the seed."""

from __future__ import annotations

import pytest

from benchmarks.policies.arrivals import recorded_arrivals


@pytest.mark.parametrize("kind", ["conversation", "coding"])
def test_recorded_arrivals_have_the_rate_and_the_seeds_place(kind: str) -> None:
    arrivals = recorded_arrivals(kind, 500, 4.0, 1)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert 499 / arrivals[-1] == pytest.approx(4.0)
    assert recorded_arrivals(kind, 500, 4.0, 1) == arrivals != recorded_arrivals(kind, 500, 4.0, 2)
