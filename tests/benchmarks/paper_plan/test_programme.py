"""SCIP against brute force: every layout of every instance that is small enough to enumerate."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_plan.programme import Capacities, Choice, best_layouts, choice_of
from planner.layout.fluid import Demand
from planner.layout.layout import Layout, replicas_of

DEGREES = (1, 2, 4, 8)
LEVELS = (0.25, 0.5, 1.0, 2.0)


def evaluate(layout: Layout, capacities: Capacities, demand: Demand) -> Choice | None:
    """The choice of a given layout; None if its memory is too small for the demand."""
    memory = sum(capacities.kv_tokens[n] * count for n, count in layout.decode)
    return choice_of(layout, capacities, demand) if memory >= demand.resident_kv_tokens * (1 - 1e-6) else None


@st.composite
def instances(draw: st.DrawFn, most_gpus: int = 16) -> tuple[Capacities, Demand, int]:
    degrees = draw(st.sets(st.sampled_from(DEGREES), min_size=1))
    rows = st.lists(st.integers(0, 40), min_size=len(LEVELS), max_size=len(LEVELS)).map(sorted)

    def table() -> dict[int, list[float]]:
        # Tenths, so that sums that are equal on paper differ by no more than rounding.
        return {degree: [value / 10 for value in draw(rows)] for degree in degrees}

    kv = {degree: float(draw(st.integers(1, 100)) * 1000) for degree in degrees}
    demand = Demand(draw(st.integers(1, 100)) / 10, float(draw(st.integers(0, 300)) * 1000))
    return Capacities(LEVELS, table(), table(), kv), demand, draw(st.integers(2, most_gpus))


def all_layouts(degrees: tuple[int, ...], gpus: int) -> Iterator[Layout]:
    for counts in product(*(range(gpus // degree + 1) for degree in (*degrees, *degrees))):
        prefill, decode = counts[: len(degrees)], counts[len(degrees) :]
        if not any(prefill) or not any(decode):
            continue
        if sum(degree * count for degree, count in zip((*degrees, *degrees), counts, strict=True)) <= gpus:
            yield Layout(
                replicas_of(dict(zip(degrees, prefill, strict=True))),
                replicas_of(dict(zip(degrees, decode, strict=True))),
            )


def worth(choice: Choice, levels: int) -> tuple[bool, int, float, int]:
    """Sorts the best first: the level counts only where the demand is met."""
    met = choice.headroom >= 1 - 1e-9
    return not met, choice.level if met else levels, -round(choice.headroom, 6), choice.layout.gpus


def ranked(capacities: Capacities, demand: Demand, gpus: int) -> list[Choice]:
    choices = [evaluate(layout, capacities, demand) for layout in all_layouts(capacities.degrees, gpus)]
    return sorted((choice for choice in choices if choice), key=lambda choice: worth(choice, len(LEVELS)))


@pytest.mark.slow
@settings(max_examples=15)
@given(instances(most_gpus=10))
def test_the_optimum_and_the_k_best_equal_brute_force(instance: tuple[Capacities, Demand, int]) -> None:
    capacities, demand, gpus = instance
    expected = ranked(capacities, demand, gpus)
    found = best_layouts(capacities, demand, gpus, 4)
    assert len(found) == min(4, len(expected))
    assert len({choice.layout for choice in found}) == len(found)
    # Layouts of equal worth may come in any order.
    assert [worth(each, 4) for each in found] == [worth(each, 4) for each in expected[: len(found)]]
    for choice in found:
        checked = evaluate(choice.layout, capacities, demand)
        assert checked is not None
        assert checked.level == choice.level
        assert checked.headroom == pytest.approx(choice.headroom, rel=1e-5, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=15)
@given(instances(), st.integers(1, 8))
def test_more_gpus_never_make_the_objective_worse(instance: tuple[Capacities, Demand, int], more: int) -> None:
    capacities, demand, gpus = instance
    few, many = (best_layouts(capacities, demand, count, 1) for count in (gpus, gpus + more))
    if few:
        assert worth(many[0], 4)[:3] <= worth(few[0], 4)[:3]


def test_memory_decides_where_the_rate_does_not() -> None:
    same = {1: [5.0] * 4, 2: [10.0] * 4}
    capacities = Capacities(LEVELS, same, same, {1: 100.0, 2: 1000.0})
    assert best_layouts(capacities, Demand(1.0, 0.0), 3, 1)[0].layout.gpus == 2
    assert best_layouts(capacities, Demand(1.0, 900.0), 3, 1)[0].layout.decode == ((2, 1),)
    assert best_layouts(capacities, Demand(1.0, 2001.0), 4, 1) == []


def test_with_a_store_running_rounds_fit_kv_memory_and_resident_sessions_fit_host_memory() -> None:
    same = {1: [1.0] * 4, 2: [1.0] * 4}
    capacities = Capacities(LEVELS, same, same, {1: 100.0, 2: 250.0}, {1: 1000.0, 2: 2000.0})
    decode = [
        [choice.layout.decode for choice in best_layouts(capacities, Demand(1.0, resident, running), 3, 1)]
        for resident, running in ((900.0, 90.0), (900.0, 240.0), (2001.0, 90.0), (900.0, 251.0))
    ]
    assert decode == [[((1, 1),)], [((2, 1),)], [], []]


def test_what_misses_the_demand_comes_as_close_as_it_can() -> None:
    capacities = Capacities(LEVELS, {1: [0, 0, 0.1, 0.2]}, {1: [0, 0, 0.1, 0.3]}, {1: 100.0})
    choice = best_layouts(capacities, Demand(1.0), 4, 1)[0]
    assert choice.headroom == pytest.approx(0.4)
    assert choice.level == 3
    assert choice.layout.prefill == ((1, 2),)


def test_a_tiny_rate_is_demanded_as_exactly_as_a_large_one() -> None:
    for scale in (1e-7, 1.0, 1e4):
        # At the second level one replica is 40 % short; per second that can be less than SCIP's tolerance.
        table = {1: [0.3 * scale, 0.6 * scale, scale, 2 * scale]}
        found = best_layouts(Capacities(LEVELS, table, table, {1: 100.0}), Demand(scale), 4, 2)
        assert [choice.layout.gpus for choice in found] == [4, 2]
        assert [choice.level for choice in found] == [1, 2]


def test_what_misses_the_rate_by_rounding_carries_it() -> None:
    table = {1: [0.1] * 4}
    capacities = Capacities(LEVELS, {1: [0.1 * (1 - 1e-12)] * 4}, table, {1: 100.0})
    choice = best_layouts(capacities, Demand(0.8), 16, 1)[0]
    assert (choice.level, choice.headroom) == (0, 1.0)
