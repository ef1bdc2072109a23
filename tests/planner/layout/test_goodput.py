"""The next rate to try: the search narrows down the highest rate that is carried, from anything known."""

from __future__ import annotations

import pytest

from planner.layout.candidate import goodput, next_rate

MOST, PRECISION = 5.0, 1.05


def searched(limit: float, start: float, known: tuple[float, ...] = ()) -> dict[float, bool]:
    """The rates that were tried, where rates up to the limit are carried."""
    carried = {rate: rate <= limit for rate in known}
    while (rate := next_rate(carried, start, MOST, PRECISION)) is not None:
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
    assert MOST / 1.6 <= goodput(searched(1e9, 1.0)) <= MOST
    assert goodput(searched(0.0, 1.0)) == 0.0


def test_the_lowest_failure_counts() -> None:
    assert goodput({1.0: True, 2.0: False, 3.0: True}) == 1.0
    assert goodput({}) == goodput({1.0: False}) == 0.0
