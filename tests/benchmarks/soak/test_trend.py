"""Growth is found in noise; a figure that has stopped growing, or of a process that did not live on, is flat."""

import random
from collections.abc import Callable

import pytest

from benchmarks.soak.trend import UNSETTLED, Point, slope, trends

MINUTES = 30


def series(value: Callable[[int], float], *, first_s: float = 0.0) -> list[Point]:
    return [(float(at_s), value(at_s)) for at_s in range(int(first_s), MINUTES * 60, 5)]


def growing(figure: str, points: list[Point]) -> list[bool]:
    return [each.is_growing for each in trends({("decode-1", figure): points}, 0.0, MINUTES * 60.0)]


def test_the_slope_is_that_of_most_points() -> None:
    points = [(float(x), 2.0 * x) for x in range(100)]
    outliers = [(x, 1e6) if x % 5 == 0 else (x, y) for x, y in points]
    assert slope(outliers) == pytest.approx(2.0, rel=0.2)


def test_a_leak_of_a_kilobyte_per_round_is_found_in_noise() -> None:
    rng = random.Random(0)
    leaking = series(lambda at_s: 100e6 + 10_000 * at_s + rng.gauss(0, 2e6))
    steady = series(lambda _: 100e6 + rng.gauss(0, 2e6))
    assert growing("RSS bytes", leaking) == [True]
    assert growing("RSS bytes", steady) == [False]


def test_a_descriptor_per_five_minutes_is_found() -> None:
    rng = random.Random(0)
    assert growing("descriptors", series(lambda at_s: 20 + at_s // 300 + rng.choice((0, 1)))) == [True]
    assert growing("descriptors", series(lambda _: 20 + rng.choice((0, 0, 1, 5)))) == [False]


def test_a_cache_that_was_filled_in_the_first_half_is_flat() -> None:
    assert growing("store tokens", series(lambda at_s: min(at_s, 600) * 50.0)) == [False]


def test_only_processes_that_lived_through_the_second_half_count() -> None:
    assert growing("descriptors", series(lambda at_s: at_s, first_s=1200)) == []
    assert growing("descriptors", series(lambda at_s: at_s)[:-60]) == []


def test_a_figure_of_another_number_of_workers_is_listed_and_not_judged() -> None:
    """Connections follow the number of workers: only those of the usual number show a leak."""
    at_rest = [point for point in series(lambda _: 20.0) if 300 < point[0] % 600 < 540]
    with_more = [(at_s, 20.0 + at_s / 300) for at_s, _ in series(lambda _: 0.0) if not 300 < at_s % 600 < 540]
    points = {("decode-1", "sockets"): at_rest, ("decode-1", f"sockets{UNSETTLED}"): with_more}
    found = trends(points, 0.0, MINUTES * 60.0)
    assert {each.figure: each.bound is None for each in found} == {"sockets": False, f"sockets{UNSETTLED}": True}
    assert not any(each.is_growing for each in found)


def replaced(at_s: float) -> bool:
    """Whether a peer is away: for half a minute, in two of five windows of the first quarter of the second half."""
    return at_s > 900 and at_s < 1200 and at_s % 120 < 40


def test_sockets_that_dip_while_a_peer_is_replaced_do_not_grow() -> None:
    """Early dips would make a slope of the lowest values alone."""
    rng = random.Random(0)
    dips = series(lambda at_s: 32 if replaced(at_s) else 35 + rng.choice((0, 0, 1)))
    assert growing("sockets", dips) == [False]


def test_a_leak_of_sockets_is_found_although_they_dip() -> None:
    rng = random.Random(0)
    leaking = series(lambda at_s: (32 if replaced(at_s) else 35) + at_s // 180 + rng.choice((0, 0, 1)))
    assert growing("sockets", leaking) == [True]


def test_a_leak_is_found_in_the_few_samples_in_which_the_processes_were_settled() -> None:
    points = [(at_s, 35.0 + at_s // 240) for at_s, _ in series(lambda _: 0.0) if at_s % 150 < 10]
    assert growing("sockets", points) == [True]


def test_a_count_that_comes_back_to_what_it_had_does_not_grow() -> None:
    """Connections of a server that restarted at the start of the second half."""
    rng = random.Random(0)
    restarted = series(lambda at_s: rng.choice((14, 15, 15, 16)) - 5 * (900 < at_s < 1300) - 2 * (1300 <= at_s < 1450))
    assert growing("connections", restarted) == [False]


@pytest.mark.parametrize("leak_from_s", [0, 900])
def test_a_leak_of_connections_is_found_although_they_were_fewer_for_a_while(leak_from_s: int) -> None:
    rng = random.Random(0)
    fewer = series(
        lambda at_s: rng.choice((14, 15, 15, 16)) - 5 * (900 < at_s < 1100) + max(0, at_s - leak_from_s) / 180
    )
    assert growing("connections", fewer) == [True]


def test_bursts_of_the_load_are_no_growth() -> None:
    bursts = series(lambda at_s: 20.0 + 10 * (at_s > 1300 and at_s % 120 >= 20))
    assert growing("descriptors", bursts) == [False]


def test_a_figure_with_too_few_samples_is_not_judged() -> None:
    points = [(at_s, at_s) for at_s in (1790.0, 1792.0, 1794.0, 1796.0, 1798.0)]
    (found,) = trends(
        {("decode-1", "sockets"): points, ("decode-1", "rounds"): series(lambda _: 0.0)}, 0.0, MINUTES * 60.0
    )[:1]
    assert found.bound is None
    assert not found.is_growing


def test_a_leak_that_begins_in_the_second_half_is_found() -> None:
    rng = random.Random(0)
    late = series(lambda at_s: 15.0 + max(0.0, at_s - 900) // 180 + rng.choice((0, 0, 1)))
    assert growing("connections", late) == [True]
    early_peak = series(lambda at_s: 15.0 + at_s // 180 + 10 * (at_s < 300))
    assert growing("connections", early_peak) == [True]
