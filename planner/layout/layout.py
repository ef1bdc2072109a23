"""What a plan is made for, sessions as a population, and what it decides: replicas per phase and degree."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import ATTAINMENT, Parallelism, Role, Slo
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from workloads.trace import Session

Replicas = tuple[tuple[int, int], ...]
"""(degree, replicas) in ascending order of degree, without zeros."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas of each tensor-parallel degree by role. With decode replicas only, the layout is co-located."""

    prefill: Replicas
    decode: Replicas
    mixed: Replicas = ()

    @property
    def groups(self) -> Mapping[Role, Replicas]:
        """The replicas by role, without roles that have none."""
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        return {role: replicas for role, replicas in named.items() if replicas}

    @property
    def gpus(self) -> int:
        return sum(degree * replicas for group in self.groups.values() for degree, replicas in group)

    def as_dict(self) -> dict[str, Any]:
        """The layout in the form of a plan's result. Mixed replicas are listed only if there are any."""
        always = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {
            str(role): [{"tp": degree, "replicas": count} for degree, count in replicas]
            for role, replicas in (always | dict(self.groups)).items()
        } | {"gpus": self.gpus}

    def __str__(self) -> str:
        return layout_label(self.as_dict())


def layout_label(row: Mapping[str, Any]) -> str:
    """A layout of a plan's result as text: `prefill 2xTP4+1xTP8, decode 2xTP4`, or `co-located 2xTP4`."""
    groups = {role: "+".join(f"{group['replicas']}xTP{group['tp']}" for group in row.get(role, ())) for role in Role}
    if not groups[Role.PREFILL] and not groups[Role.MIXED]:
        return f"co-located {groups[Role.DECODE]}"
    return ", ".join(f"{role} {text}" for role, text in groups.items() if text)


def replicas_of(counts: Mapping[int, int]) -> Replicas:
    return tuple((degree, counts[degree]) for degree in sorted(counts) if counts[degree])


# -- The sessions of a trace as a population: what a mean session is like, and the load of a trial.
#
# A trial must not depend on where a session stands in the file. So the sessions are sorted by what they do, and drawn
# at random, without replacement until all have been drawn. Each tenth of the sessions, from the lightest to the
# heaviest ones, gives every tenth session of a trial. So a short trial has light and heavy sessions in the trace's
# proportion.
#
# A cluster that begins empty needs the time of several sessions until as many of them are in progress as later on. So a
# trial begins in the middle: with as many sessions in progress as there are on average if rounds take a given share of
# their targets, each at a random moment of its life. Their KV is there. A round that runs at that moment has just ended
# instead, so decode batches must fill before anything is counted. That takes the time of a round, and not of a session.

_STRATA = 10


@dataclass(frozen=True, slots=True)
class Life:
    """The times of a session.

    Attributes:
        rounds_s: of each round, if it takes its targets.
        tools_s: before each round; 0 before the first one.
    """

    session: Session
    rounds_s: tuple[float, ...]
    tools_s: tuple[float, ...]

    @classmethod
    def of(cls, session: Session, slo: Slo) -> Life:
        rounds_s = tuple(slo.ttft_s + slo.itl_s * (item.output_tokens - 1) for item in session.rounds)
        return cls(session, rounds_s, tuple(item.tool_s for item in session.rounds))

    def seconds(self, speed: float = 1.0) -> float:
        """From the arrival to the end, if each round takes `speed` times its targets."""
        return speed * sum(self.rounds_s) + sum(self.tools_s)

    def sent_s(self, speed: float) -> list[float]:
        """When each round is sent, from the arrival on."""
        steps = (speed * round_s + tool_s for round_s, tool_s in zip(self.rounds_s, self.tools_s[1:], strict=False))
        return [0.0, *accumulate(steps)]


@dataclass(frozen=True, slots=True)
class Population:
    """The sessions of a trace, whatever their order in it.

    Attributes:
        lives: sorted, the sessions whose rounds take least first.
        rounds: of the mean session.
        lifetime_s: of the mean session at its targets, tools included.
        round_s: of the mean round at its targets.
        start_s: the decode batches of an empty cluster are nearly full after this time, if the load begins at once.
    """

    lives: tuple[Life, ...]
    rounds: float
    lifetime_s: float
    round_s: float
    start_s: float

    @classmethod
    def of(cls, sessions: Sequence[Session], slo: Slo) -> Population:
        lives = sorted((Life.of(session, slo) for session in sessions), key=_weight)
        rounds_s = sorted(seconds for life in lives for seconds in life.rounds_s)
        return cls(
            tuple(lives),
            len(rounds_s) / len(lives),
            fmean(life.seconds() for life in lives),
            fmean(rounds_s),
            _nearly_full_s(rounds_s),
        )

    def draws(self, rng: random.Random) -> Iterator[Life]:
        """Sessions without end. Each comes once before any comes twice."""
        count = len(self.lives)
        bounds = [count * stratum // _STRATA for stratum in range(_STRATA + 1)]
        while True:
            strata = [rng.sample(self.lives[low:high], high - low) for low, high in pairwise(bounds)]
            for row in zip_longest(*strata):
                present = [life for life in row if life is not None]
                yield from rng.sample(present, len(present))


_FULL = 0.95


def _nearly_full_s(rounds_s: Sequence[float]) -> float:
    """The time in which rounds of these times (ascending) have built up most of their steady number."""
    wanted, before_s = _FULL * sum(rounds_s), 0.0
    for index, seconds in enumerate(rounds_s):
        # Rounds that are longer than this one are all still there after its time.
        longer = len(rounds_s) - index
        if before_s + longer * seconds >= wanted:
            return (wanted - before_s) / longer
        before_s += seconds
    return rounds_s[-1]


def _weight(life: Life) -> tuple[object, ...]:
    """Sorts sessions by what they do. Those that are equal in it are interchangeable."""
    session = life.session
    shared = session.shared_prefix
    rounds = [
        (item.incr_tokens, item.output_tokens, item.tool_s, -1 if item.keep_tokens is None else item.keep_tokens)
        for item in session.rounds
    ]
    return sum(life.rounds_s), rounds, ("", 0) if shared is None else (shared.id, shared.tokens)


# -- the load of a trial


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
    """The sessions of a trial, and the tokens of those that were in progress when it began."""

    sessions: Mapping[str, Served]
    idle_tokens: Mapping[str, int]


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
    idle_tokens: dict[str, int] = {}
    begun = _in_progress(population, rate, speed, random.Random(f"{seed}/in-progress"))
    # The memory evicts the session that was used least recently, so the order is that of their last use.
    for number, each in enumerate(sorted(begun, key=lambda each: each.used_s)):
        session = each.life.session
        contexts = _contexts_tokens(session)[: each.number]
        if not 0 < most_tokens < max(contexts):
            name = f"begun-{number}"
            sessions[name] = _served(each.life, name, each.number, each.sent_s)
            idle_tokens[name] = contexts[-1]
    draws, gaps = population.draws(random.Random(f"{seed}/draws")), random.Random(f"{seed}/arrivals")
    now_s, number = gaps.expovariate(rate), 0
    while now_s < seconds:
        life, name, number = next(draws), f"new-{number}", number + 1
        sessions[name] = _served(life, name, 0, now_s)
        now_s += gaps.expovariate(rate)
    return Load(sessions, idle_tokens)


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


# -- the case


@dataclass(frozen=True)
class PlanCase:
    """What to plan for.

    Attributes:
        rate: sessions per second.
        kv_capacity_tokens: KV memory of a replica by degree; 0: unlimited.
        kv_store_tokens: host memory of a replica's KV store by degree; empty: no stores.
        attainment: share of the rounds within both targets that counts as carrying a rate.
    """

    sessions: tuple[Session, ...]
    rate: float
    slo: Slo
    model: PiecewiseModel
    kv_capacity_tokens: dict[int, int]
    gpus: int
    routing: str
    ordering: str
    slicing: str
    pools: str
    options: SimulationOptions
    kv_store_tokens: dict[int, int] = field(default_factory=dict)
    attainment: float = ATTAINMENT

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted(self.kv_capacity_tokens))

    @cached_property
    def population(self) -> Population:
        """Its sessions as a population."""
        return Population.of(self.sessions, self.slo)

    def cluster_of(self, layout: Layout) -> Cluster:
        """The simulated cluster of a layout."""
        kv_tokens, store_tokens = self.kv_capacity_tokens, self.kv_store_tokens
        decode, prefill, mixed = (
            tuple(ReplicaGroup(count, Parallelism(n), kv_tokens[n], store_tokens.get(n, 0)) for n, count in replicas)
            for replicas in (layout.decode, layout.prefill, layout.mixed)
        )
        return Cluster(decode, prefill, self.model.profile.max_context_tokens or 0, mixed)

    def new_policies(self) -> Policies:
        """The online policies of one simulation. Some remember what they have seen, so each simulation has its own."""
        return Policies(
            create_named("binding", defaults.BINDING),
            create_named("routing", self.routing),
            create_named("ordering", self.ordering),
            create_named("slicing", self.slicing),
            create_named("pools", self.pools),
        )
