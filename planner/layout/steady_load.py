"""The load of a trial: sessions in progress when it begins, and sessions that arrive.

A cluster that begins empty needs the time of several sessions until as many of them are in progress as later on. So a
trial begins in the middle: with as many sessions in progress as there are on average if rounds take a given share of
their targets, each at a random moment of its life. Their KV is there. A round that runs at that moment has just ended
instead, so decode batches must fill before anything is counted. That takes the time of a round, and not of a session.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from planner.layout.population import Life, Population
from planner.simulator.options import UnderWay
from workloads.trace import Session


class Served(NamedTuple):
    """A session of a trial.

    Attributes:
        session: what is left of it, which arrives with its next round.
        rounds_s: time of each of these rounds at its targets.
        whole_s: time of the whole session at its targets, tools included.
        begun_rounds: rounds that were over before the trial.
    """

    session: Session
    rounds_s: tuple[float, ...]
    whole_s: float
    begun_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions of a trial, and how far those are that were in progress when it began."""

    sessions: Mapping[str, Served]
    under_way: Mapping[str, UnderWay]


class _Begun(NamedTuple):
    """A session in progress: the number of its next round, when that is sent, when the round before ended."""

    life: Life
    number: int
    sent_s: float
    used_s: float


def steady_load(
    population: Population, rate: float, seconds: float, speed: float, seed: int, *, most_tokens: int
) -> Load:
    """The load of a trial.

    Args:
        rate: sessions per second.
        seconds: how long sessions arrive.
        speed: time of the rounds in progress, as a share of their targets.
        most_tokens: a session whose context was longer is not in progress, because it was refused; 0: unlimited.
    """
    sessions: dict[str, Served] = {}
    under_way: dict[str, UnderWay] = {}
    begun = _in_progress(population, rate, speed, random.Random(f"{seed}/in-progress"))
    # The memory evicts the session that was used least recently, so the order is that of their last use.
    for number, each in enumerate(sorted(begun, key=lambda each: each.used_s)):
        session = each.life.session
        contexts = _contexts_tokens(session)[: each.number]
        if not 0 < most_tokens < max(contexts):
            name = f"begun-{number}"
            sessions[name] = _served(each.life, name, each.number, each.sent_s)
            under_way[name] = UnderWay(contexts[-1], is_idle=True)
    draws, gaps = population.draws(random.Random(f"{seed}/draws")), random.Random(f"{seed}/arrivals")
    now_s, number = gaps.expovariate(rate), 0
    while now_s < seconds:
        life, name, number = next(draws), f"new-{number}", number + 1
        sessions[name] = _served(life, name, 0, now_s)
        now_s += gaps.expovariate(rate)
    return Load(sessions, under_way)


def _in_progress(population: Population, rate: float, speed: float, rng: random.Random) -> Iterator[_Begun]:
    """The sessions in progress at a moment.

    All sessions' lives stand one after the other on a line, which is cut into equal parts, as many as sessions are in
    progress. A random point of each part is the moment in one session's life. So long lives are met more often, as in
    reality, while the number of sessions and their mix hardly differ between seeds.
    """
    lives = population.lives
    part_s = len(lives) / rate
    end_s = 0.0
    number, point_s = 0, rng.random() * part_s
    for life in lives:
        begin_s, end_s = end_s, end_s + life.seconds(speed)
        while point_s < end_s:
            age_s = point_s - begin_s
            sent_s = life.sent_s(speed)
            index = next((index for index, when_s in enumerate(sent_s) if when_s > age_s), None)
            if index is not None:
                ended_s = sent_s[index] - life.tools_s[index]
                yield _Begun(life, index, sent_s[index] - age_s, ended_s - age_s)
            number += 1
            point_s = (number + rng.random()) * part_s


def _served(life: Life, name: str, index: int, sent_s: float) -> Served:
    session = life.session
    left = session.model_copy(update={"session_id": name, "arrival_s": sent_s, "rounds": session.rounds[index:]})
    return Served(left, life.rounds_s[index:], life.seconds(), index)


def _contexts_tokens(session: Session) -> list[int]:
    """The context after each round."""
    rounds = zip(session.prompts_tokens(), session.rounds, strict=True)
    return [history + increment + item.output_tokens for (history, increment), item in rounds]
