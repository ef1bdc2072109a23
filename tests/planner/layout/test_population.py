"""What trials draw from: the set of sessions counts, and not their order."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from planner.layout.layout import Life, Population
from workloads.trace import Session

from .lab import CASE, SESSIONS, SLO


def shuffled(sessions: tuple[Session, ...], seed: int) -> tuple[Session, ...]:
    """Another order, and other names and arrivals."""
    mixed = random.Random(seed).sample(sessions, len(sessions))
    return tuple(
        session.model_copy(update={"session_id": f"other-{number}", "arrival_s": float(number)})
        for number, session in enumerate(mixed)
    )


def drawn(population: Population, count: int, seed: int) -> list[Life]:
    return list(islice(population.draws(random.Random(seed)), count))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_trace_changes_no_draw(seed: int) -> None:
    first, other = (Population.of(sessions, SLO) for sessions in (SESSIONS, shuffled(SESSIONS, seed)))
    assert [life.session.rounds for life in drawn(first, 250, seed)] == [
        life.session.rounds for life in drawn(other, 250, seed)
    ]
    assert (first.rounds, first.start_s) == (other.rounds, other.start_s)
    assert drawn(first, 100, seed) != drawn(first, 100, seed + 1)


@pytest.mark.parametrize("count", [1, 7, 10, 23, 100])
def test_each_session_is_drawn_once_before_any_is_drawn_twice(count: int) -> None:
    population = Population.of(SESSIONS[:count], SLO)
    draws = drawn(population, 3 * count, 0)
    names = Counter(life.session.session_id for life in draws)
    assert set(names.values()) == {3}
    for lap in range(3):
        assert len({life.session.session_id for life in draws[lap * count : (lap + 1) * count]}) == count


def test_a_few_draws_have_light_and_heavy_sessions_in_proportion() -> None:
    population = Population.of(SESSIONS, SLO)
    ranks = {life.session.session_id: rank for rank, life in enumerate(population.lives)}
    for seed in range(5):
        tenths = Counter(ranks[life.session.session_id] // 10 for life in drawn(population, 20, seed))
        assert tenths == dict.fromkeys(range(10), 2)


def test_a_population_is_made_once_and_knows_the_mean_session() -> None:
    population = CASE.population
    first_s, second_s = 0.3 + 2 * 0.02, 0.3 + 0.02
    assert population.rounds == 2
    assert population.lifetime_s == pytest.approx(first_s + second_s + 1.0)
    assert population.round_s == pytest.approx((first_s + second_s) / 2)
    assert second_s * 0.95 < population.start_s < first_s


def test_rounds_are_sent_after_the_round_before_and_its_tool() -> None:
    (life,) = {life.rounds_s: life for life in CASE.population.lives}.values()
    assert life.sent_s(0.5) == pytest.approx([0.0, 0.5 * life.rounds_s[0] + 1.0])
    assert life.seconds(0.5) == pytest.approx(0.5 * sum(life.rounds_s) + 1.0)
