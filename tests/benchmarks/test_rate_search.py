"""The search of the highest rate: exact on monotone functions, and it ends on any."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rate_search import RateSearch
from workloads.results import Attainment


@dataclass
class Falling:
    """Attainment that falls below the target at a rate; asked rates are noted."""

    rounds_limit: float
    sessions_limit: float = 0.0
    asked: list[float] = field(default_factory=list)

    def __call__(self, rate: float) -> Attainment:
        self.asked.append(rate)
        return Attainment(float(rate <= self.rounds_limit), float(rate <= self.sessions_limit))


@given(
    limit=st.floats(0.02, 900.0),
    start=st.floats(0.02, 900.0),
    precision=st.sampled_from([1.01, 1.05, 1.3]),
    first_step=st.sampled_from([1.05, 1.1, 1.25]),
)
def test_a_monotone_limit_is_found_within_the_precision(
    limit: float, start: float, precision: float, first_step: float
) -> None:
    attained = Falling(limit)
    rate = RateSearch(attained, precision, first_step=first_step).highest(0.9, "rounds", start)
    assert rate <= limit < rate * precision * (1 + 1e-9)
    assert len(set(attained.asked)) == len(attained.asked), "no rate is simulated twice"


@given(rounds=st.floats(0.5, 500.0), share=st.floats(0.1, 1.0))
def test_a_second_criterion_shares_what_was_tried(rounds: float, share: float) -> None:
    attained = Falling(rounds, rounds * share)
    search = RateSearch(attained)
    first = search.highest(0.9, "rounds", 1.0)
    second = search.highest(0.9, "sessions", first)
    assert second <= rounds * share < second * 1.05 * (1 + 1e-9)
    assert len(set(attained.asked)) == len(attained.asked)


@pytest.mark.parametrize("start", [0.005, 0.5, 50.0])
def test_what_never_holds_carries_nothing(start: float) -> None:
    attained = Falling(0.0)
    assert RateSearch(attained).highest(0.9, "rounds", start) == 0.0
    assert len(attained.asked) < 30


def test_what_always_holds_ends_at_the_highest_rate() -> None:
    attained = Falling(float("inf"))
    rate = RateSearch(attained, highest_rate=100.0).highest(0.9, "rounds", 1.0)
    assert 100.0 <= rate < 160.0


@given(seed=st.integers(0, 10_000), start=st.floats(0.05, 50.0))
def test_noise_ends_too_and_the_lowest_failure_counts(seed: int, start: float) -> None:
    rng = random.Random(seed)
    search = RateSearch(lambda rate: Attainment(1.0 - 0.02 * rate + rng.gauss(0, 0.05), 0.0))
    rate = search.highest(0.9, "rounds", start)
    failed = [tried for tried, shares in search.tried.items() if shares.rounds < 0.9]
    assert not rate or search.tried[rate].rounds >= 0.9
    assert failed
    assert rate < min(failed)
    assert len(search.tried) < 60


def test_what_holds_above_a_known_failure_does_not_count() -> None:
    tried = {rate: Attainment(share, 0.0) for rate, share in ((1.0, 1.0), (2.0, 0.5), (3.0, 1.0), (4.0, 0.5))}
    rate = RateSearch(Falling(1.5), tried=dict(tried)).highest(0.9, "rounds", 3.0)
    assert rate <= 1.5 < 1.05 * rate
