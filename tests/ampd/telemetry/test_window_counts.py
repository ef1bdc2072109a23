"""Latencies as counts: quantiles within the promised error, and parts that add up to the whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.telemetry.windows import ERROR, bucket_of, latency_counts, latency_summary

samples = st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=200)
NOTHING = {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None}


def counted(values_s: Iterable[float]) -> Counter[str]:
    counts = Counter[str]()
    for value_s in values_s:
        counts.update(latency_counts("itl", value_s))
    return counts


def summary(values_s: Iterable[float]) -> dict[str, Any]:
    return latency_summary(counted(values_s), "itl")


@given(samples, st.sampled_from([50, 95, 99]))
def test_a_quantile_is_off_by_one_percent_at_most(values_s: list[float], percent: int) -> None:
    exact_s = sorted(values_s)[max(math.ceil(percent / 100 * len(values_s)), 1) - 1]
    assert summary(values_s)[f"p{percent}"] == pytest.approx(exact_s, rel=ERROR * (1 + 1e-9))


@given(st.lists(samples, max_size=4))
def test_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    joined = sum(map(counted, parts), Counter())
    assert joined == counted(value for part in parts for value in part)
    assert latency_summary(joined, "itl")["count"] == sum(map(len, parts))


@given(samples)
def test_the_mean_is_exact_to_a_microsecond(values_s: list[float]) -> None:
    assert summary(values_s)["mean"] == pytest.approx(sum(values_s) / len(values_s), abs=1e-6)


def test_nothing_has_neither_mean_nor_quantile() -> None:
    assert summary([]) == NOTHING
    assert latency_summary(counted([1.0]), "it") == NOTHING


def test_what_is_no_bucket_counts_nothing() -> None:
    """Other processes publish what is read here."""
    assert latency_summary({"itl x": 3, "itl 99999": 3, "itl ": 1, "itl us": 7}, "itl") == NOTHING


@pytest.mark.parametrize("value_s", [0.0, -1.0, 1e-9])
def test_what_is_too_short_to_tell_counts_as_a_microsecond(value_s: float) -> None:
    assert bucket_of(value_s) == bucket_of(1e-6)


def test_buckets_stay_few() -> None:
    # a view is published every second: from a millisecond to a minute it has a few hundred buckets at most
    assert bucket_of(60.0) - bucket_of(0.001) < 600
