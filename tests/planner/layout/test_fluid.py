"""The fluid programme: its optimum is that of enumeration, and its proposals differ from one another."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from benchmarks.layout_regret import every_layout
from planner.layout.fluid import Costs, fewest_gpus, most_rate, proposals
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


def rate_of(costs: Costs, layout: Layout, *, has_local: bool = True) -> float:
    """The most that one layout carries: a linear programme without integers, written down separately.

    Each replica kind has three flows: prefill, decode, and prefill of what was dropped.
    """
    groups = [(costs.degrees.index(n), count, False) for n, count in layout.prefill]
    groups += [(costs.degrees.index(n), count, True) for n, count in layout.decode]
    width = 3 * len(groups) + 1
    rows: list[list[float]] = []
    limits: list[float] = []

    def limit(terms: Mapping[int, float], most: float) -> None:
        rows.append([terms.get(column, 0.0) for column in range(width)])
        limits.append(most)

    bounds: list[tuple[float, float | None]] = []
    for index, (degree, count, owns) in enumerate(groups):
        n = costs.degrees[degree]
        able = (
            n in costs.prefill_s and (has_local or not owns),
            owns and n in costs.decode_s,
            costs.resident is not None and n in costs.again_s and (has_local or not owns),
        )
        bounds += [(0, None if each else 0) for each in able]
        seconds = (costs.prefill_s.get(n, 0.0), costs.decode_s.get(n, 0.0), costs.again_s.get(n, 0.0))
        limit({3 * index + flow: each for flow, each in enumerate(seconds)}, count)
        if owns:
            limit({3 * index: 1, 3 * index + 1: -1}, 0)
            limit({3 * index + 2: 1, 3 * index + 1: -1}, 0)
    bounds.append((0, None))

    def at_least_the_rate(flow: int, held: float = 0.0) -> None:
        limit({width - 1: 1} | ({3 * index + flow: -1 for index in range(len(groups))} if flow >= 0 else {}), held)

    def held(tokens: Mapping[int, float], token_s: float) -> float:
        return sum(tokens[n] * count for n, count in layout.decode) / token_s

    at_least_the_rate(0)
    at_least_the_rate(1)
    for memory in costs.memories:
        at_least_the_rate(-1, held(*memory))
    if costs.resident is not None:
        at_least_the_rate(2, held(*costs.resident))
    found = linprog([0.0] * (width - 1) + [-1.0], A_ub=rows, b_ub=limits, bounds=bounds)
    assert found.status == 0
    return -float(found.fun)


SECONDS = st.floats(0.05, 5)
PHASES = (Phase.explicit, Phase.generate)
"""Without shrinking, which takes minutes: each example solves hundreds of programmes."""
DEGREES = st.sampled_from([(1,), (1, 2), (2, 3), (1, 2, 4), (2, 4)])


def by_degree(values: st.SearchStrategy[float]) -> st.SearchStrategy[dict[int, float]]:
    return st.fixed_dictionaries(dict.fromkeys((1, 2, 3, 4), values))


@st.composite
def several_costs(draw: st.DrawFn) -> Costs:
    """Costs of one to three degrees, some of which may be unable to prefill or decode, with and without memory."""
    degrees = draw(DEGREES)

    def some(values: dict[int, float]) -> dict[int, float]:
        able = draw(st.sets(st.sampled_from(degrees), min_size=1))
        return {n: values[n] for n in degrees if n in able}

    prefill_s, decode_s = some(draw(by_degree(SECONDS))), some(draw(by_degree(SECONDS)))
    tokens = by_degree(st.floats(10, 1000))
    memories = [(draw(tokens), draw(st.floats(10, 2000)))] if draw(st.booleans()) else []
    resident = (draw(tokens), draw(st.floats(10, 5000))) if draw(st.booleans()) else None
    again_s = {n: seconds for n, seconds in some(draw(by_degree(SECONDS))).items() if n in prefill_s}
    return Costs(degrees, prefill_s, decode_s, memories, {}, resident, again_s)


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(costs=several_costs(), gpus=st.integers(4, 7))
def test_the_optimum_of_several_degrees_with_memory_equals_the_best_of_all_layouts(costs: Costs, gpus: int) -> None:
    rates = {
        layout: rate_of(costs, layout)
        for layout in every_layout(costs.degrees, gpus)
        if all(n in costs.prefill_s for n, _ in layout.prefill) and all(n in costs.decode_s for n, _ in layout.decode)
    }
    colocated = {layout: rate for layout, rate in rates.items() if not layout.prefill}
    for prefill, those in ((None, rates), ((), colocated)):
        found = most_rate(costs, gpus, prefill)
        assert found is not None
        best = max(those.values())
        assert found[1] == pytest.approx(best, rel=1e-4, abs=1e-5)
        assert those[found[0]] == pytest.approx(best, rel=1e-4, abs=1e-5)
    if max(rates.values()) > 0.01:
        asked = 0.6 * max(rates.values())
        assert fewest_gpus(costs, gpus, asked) == min(
            layout.gpus for layout, rate in rates.items() if rate >= asked * (1 - 1e-6)
        )


@settings(max_examples=20, deadline=None, phases=PHASES)
@given(costs=several_costs(), gpus=st.integers(4, 7))
def test_the_best_split_of_a_pair_of_degrees_equals_enumeration(costs: Costs, gpus: int) -> None:
    prefill, decode = max(costs.prefill_s), min(costs.decode_s)
    found = most_rate(costs, gpus, (prefill,), (decode,), has_local=False)
    rates = [
        rate_of(costs, Layout(((prefill, x),), ((decode, y),)), has_local=False)
        for x in range(1, gpus // prefill + 1)
        for y in range(1, (gpus - prefill * x) // decode + 1)
    ]
    assert (found is None) == (not rates)
    if found is not None:
        assert found[1] == pytest.approx(max(rates), rel=1e-4, abs=1e-5)


def test_what_memory_does_not_keep_is_computed_again_instead_of_being_refused() -> None:
    kept = ({1: 100.0}, 1000.0)
    hard = Costs((1,), {1: 0.2}, {1: 0.2}, [], {}, kept)
    soft = Costs((1,), {1: 0.2}, {1: 0.2}, [], {}, kept, {1: 0.6})
    rates = [found[1] for costs in (hard, soft) if (found := most_rate(costs, 1)) is not None]
    # Of every second, 0.1 sessions are kept, and those that are not cost 1 instead of 0.4.
    assert rates == pytest.approx([0.1, 0.1 + (1 - 0.1 * 0.4) / 1.0], rel=1e-4)
    free = most_rate(soft.without_memory(), 1)
    assert free is not None
    assert free[1] == pytest.approx(2.5, rel=1e-4)


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
