"""The next rate to try: the search narrows down the highest rate that is carried, from anything known."""

from __future__ import annotations

from itertools import pairwise
from math import nextafter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.layout.goodput import MOST_HEADROOM, PRECISION, SAME, goodput, is_least, next_rate


def searched(limit: float, start: float, known: tuple[float, ...] = ()) -> dict[float, bool]:
    """The rates that were tried, where rates up to the limit are carried."""
    carried = {rate: rate <= limit for rate in known}
    while (rate := next_rate(carried, start)) is not None:
        assert rate not in carried
        carried[rate] = rate <= limit
    return carried


@pytest.mark.parametrize("start", [0.5, 0.97, 1.0, 1.3, 4.0])
@pytest.mark.parametrize("known", [(), (0.2,), (0.9, 1.2), (1.5,)])
def test_the_goodput_is_within_the_precision(start: float, known: tuple[float, ...]) -> None:
    carried = searched(1.0, start, known)
    assert 1.0 / PRECISION <= goodput(carried) <= 1.0
    assert len(carried) - len(known) <= 9


def test_a_good_start_needs_three_rates() -> None:
    assert len(searched(1.02, 1.0)) == 3


def test_a_search_has_an_end_where_all_or_no_rates_are_carried() -> None:
    assert goodput(searched(1e9, 1.0)) >= MOST_HEADROOM
    assert goodput(searched(0.0, 1.0)) == 0.0


def test_a_goodput_above_which_no_rate_failed_is_the_least() -> None:
    assert is_least(searched(1e9, 1.0))
    assert not is_least(searched(1.02, 1.0))
    assert not is_least(searched(0.0, 1.0))
    assert not is_least({})


def test_the_lowest_failure_counts() -> None:
    assert goodput({1.0: True, 2.0: False, 3.0: True}) == 1.0
    assert goodput({}) == goodput({1.0: False}) == 0.0


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), st.floats(0.3, 3.0), st.floats(0.3, 3.0))
def test_no_two_rates_of_searches_with_different_seeds_are_nearly_the_same(
    limits: list[float], planned: float, start: float
) -> None:
    tried: dict[float, set[int]] = {planned: set()}
    for seeds, precision in (([0], 1.1), ([0, 1, 2], 1.05), ([1], 1.1), ([2], 1.1), ([0, 1, 2], 1.0125)):
        limit = fmean(limits[seed] for seed in seeds)

        def carried(seeds: list[int] = seeds, limit: float = limit) -> dict[float, bool]:
            return {rate: rate <= limit for rate, known in tried.items() if known.issuperset(seeds)}

        while (rate := next_rate(carried(), start, precision, tried)) is not None:
            assert rate not in carried()
            tried.setdefault(rate, set()).update(seeds)
        found, failing = goodput(carried()), [rate for rate, carries in carried().items() if not carries]
        assert not found or not failing or min(failing) / found <= precision
        start = found or start
    assert all(high / low >= SAME for low, high in pairwise(sorted(tried)))


def test_a_rate_one_rounding_step_apart_is_the_known_one() -> None:
    known = nextafter(19.5625948061177 / 1.1, 0.0)
    assert next_rate({19.5625948061177: False}, 19.5625948061177, tried=[known]) == known
