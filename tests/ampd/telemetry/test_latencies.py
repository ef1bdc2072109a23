"""Latencies in buckets: quantiles within the promised error, and parts that add up to the whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.telemetry.latencies import ERROR, Latencies, bucket_of, merged

latencies_s = st.floats(1e-6, 1e5)
samples = st.lists(latencies_s, min_size=1, max_size=200)


@given(samples, st.floats(0, 1))
def test_a_quantile_is_off_by_one_percent_at_most(values_s: list[float], share: float) -> None:
    estimate_s = Latencies.of(values_s).quantile_s(share)
    exact_s = sorted(values_s)[max(math.ceil(share * len(values_s)), 1) - 1]
    assert estimate_s == pytest.approx(exact_s, rel=ERROR * (1 + 1e-9))


@given(st.lists(samples, max_size=4))
def test_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    whole = Latencies.of(value for part in parts for value in part)
    joined = merged(map(Latencies.of, parts))
    assert joined.buckets == whole.buckets
    assert joined.total_s == pytest.approx(whole.total_s)
    assert joined.count == sum(map(len, parts))


@given(samples)
def test_the_mean_is_exact(values_s: list[float]) -> None:
    assert Latencies.of(values_s).mean_s == pytest.approx(sum(values_s) / len(values_s))


def test_nothing_has_neither_mean_nor_quantile() -> None:
    assert Latencies().count == 0
    assert Latencies().mean_s is None
    assert Latencies().quantile_s(0.5) is None


@pytest.mark.parametrize("value_s", [0.0, -1.0, 1e-9])
def test_what_is_too_short_to_tell_counts_as_a_microsecond(value_s: float) -> None:
    assert bucket_of(value_s) == bucket_of(1e-6)


def test_buckets_stay_few() -> None:
    # a view is published every second: from a millisecond to a minute it has a few hundred buckets at most
    assert bucket_of(60.0) - bucket_of(0.001) < 600
