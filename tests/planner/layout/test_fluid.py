"""The fluid programme: its optimum is that of enumeration, and its proposals differ from one another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.layout.costs import Costs
from planner.layout.fluid import fewest_gpus, most_rate, proposals
from planner.layout.layout import Layout

COSTS = Costs((1, 2, 4), {1: 1.0, 2: 0.6, 4: 0.4}, {1: 0.5, 2: 0.3, 4: 0.2}, [])


@settings(max_examples=15)
@given(
    degree=st.sampled_from([1, 2, 4]),
    prefill_s=st.floats(0.05, 5),
    decode_s=st.floats(0.05, 5),
    gpus=st.integers(4, 12),
)
def test_the_optimum_equals_enumeration(degree: int, prefill_s: float, decode_s: float, gpus: int) -> None:
    costs = Costs((degree,), {degree: prefill_s}, {degree: decode_s}, [])
    replicas = gpus // degree
    layouts = [
        Layout(((degree, x),) if x else (), ((degree, y),)) for x in range(replicas) for y in range(1, replicas + 1 - x)
    ]
    found = most_rate(costs, gpus)
    assert found is not None
    best = max(costs.bound(layout) for layout in layouts)
    assert found[1] == pytest.approx(best, rel=1e-5)
    assert costs.bound(found[0]) == pytest.approx(best, rel=1e-5)
    for rate in (0.3 * best, 0.8 * best):
        able = [layout.gpus for layout in layouts if costs.bound(layout) >= rate * (1 - 1e-6)]
        assert fewest_gpus(costs, gpus, rate) == min(able)
    assert fewest_gpus(costs, gpus, 1.1 * best) is None


def test_memory_limits_the_rate() -> None:
    costs = Costs((1, 2), {1: 1.0, 2: 0.6}, {1: 0.5, 2: 0.3}, [({1: 100.0, 2: 300.0}, 1000.0)])
    found = most_rate(costs, 4)
    assert found is not None
    layout, rate = found
    assert rate == pytest.approx(sum({1: 0.1, 2: 0.3}[n] * count for n, count in layout.decode), rel=1e-5)


def test_proposals_differ_and_include_colocated_layouts() -> None:
    found = proposals(COSTS, 4)
    assert len(set(found)) == len(found)
    assert any(not layout.prefill for layout in found)
    assert any(layout.prefill for layout in found)
    assert all(layout.decode and layout.gpus <= 4 for layout in found)
    assert proposals(COSTS, 0) == []
