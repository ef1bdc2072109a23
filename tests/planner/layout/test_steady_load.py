"""The load of a trial is steady from its beginning: sessions are in progress, and rounds come at the same rate."""

from __future__ import annotations

from statistics import fmean

import pytest

from planner.layout.layout import Life, Load, Population, steady_load
from workloads.trace import Round, Session

from .lab import SESSIONS, SLO

POPULATION = Population.of(SESSIONS, SLO)
RATE, SECONDS = 20.0, 30.0


def load(seed: int = 0, *, most_tokens: int = 0, speed: float = 0.5) -> Load:
    return steady_load(POPULATION, RATE, SECONDS, speed, seed, most_tokens=most_tokens)


def test_as_many_sessions_are_in_progress_as_the_rate_and_their_lives_give() -> None:
    lifetime_s = fmean(life.seconds(0.5) for life in POPULATION.lives)
    # Those in their last round have no next one, so they are not in progress any more.
    last_s = fmean(0.5 * life.rounds_s[-1] for life in POPULATION.lives)
    counts = [len(load(seed).idle_tokens) for seed in range(10)]
    assert fmean(counts) == pytest.approx(RATE * (lifetime_s - last_s), rel=0.03)


@pytest.mark.parametrize("speed", [0.2, 1.0])
def test_rounds_are_sent_at_the_same_rate_all_the_time(speed: float) -> None:
    sent: list[float] = []
    for seed in range(10):
        for served in load(seed, speed=speed).sessions.values():
            life = Life.of(served.session, SLO)
            sent += [served.session.arrival_s + after_s for after_s in life.sent_s(speed)]
    rounds = RATE * POPULATION.rounds * 10
    for start_s in (0.0, 5.0, 15.0, 25.0):
        assert sum(start_s <= each < start_s + 5 for each in sent) == pytest.approx(5 * rounds, rel=0.08)


def test_a_session_in_progress_has_the_context_and_the_rounds_that_it_would_have() -> None:
    made = load()
    by_rest = {life.session.rounds[number:]: life for life in POPULATION.lives for number in range(1, 50)}
    for name, tokens in made.idle_tokens.items():
        served = made.sessions[name]
        life = by_rest[served.session.rounds]
        done = life.session.rounds[: served.begun_rounds]
        assert done
        assert tokens == sum(item.incr_tokens + item.output_tokens for item in done)
        assert served.rounds_s == life.rounds_s[served.begun_rounds :]
        assert served.whole_s == life.seconds()
    assert not any(served.begun_rounds for name, served in made.sessions.items() if name not in made.idle_tokens)


def test_sessions_with_a_longer_context_than_any_replica_takes_are_not_in_progress() -> None:
    limit = sorted(load().idle_tokens.values())[-20]
    limited = load(most_tokens=limit)
    assert 0 < len(limited.idle_tokens) < len(load().idle_tokens)
    assert max(limited.idle_tokens.values()) <= limit


def test_the_context_that_was_used_last_goes_last() -> None:
    rounds = (Round(incr_tokens=1, output_tokens=1), Round(incr_tokens=1, output_tokens=1, tool_s=100.0))
    lone = Population.of([Session(session_id="s", arrival_s=0.0, rounds=rounds)], SLO)
    made = steady_load(lone, 5.0, 1.0, 0.5, 0, most_tokens=0)
    # All of them are in the same tool, so the one that comes back first was used first.
    sent_s = [made.sessions[name].session.arrival_s for name in made.idle_tokens]
    assert len(sent_s) > 100
    assert sent_s == sorted(sent_s)
