"""Small random clusters and sessions, policies that decide by dice, and what must hold after every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model
from ampd.policies.base import (
    BindingSituation,
    OrderingPolicy,
    OrderingSituation,
    Pick,
    PoolsSituation,
    RoleChange,
    RoutingSituation,
    Run,
    Wait,
)
from ampd.policies.pools.predictive import PredictivePools
from ampd.policies.registry import create, create_named
from ampd.types import Parallelism, Role, Route, RouteDecision, Slo
from planner.simulator.kv_memory import NO_PREFIXES, KvMemory, KvStore
from planner.simulator.options import Cluster, EventLoop, Policies, ReplicaGroup, SimulationOptions, World
from planner.simulator.outcome import SimulationRun
from planner.simulator.shared_prefixes import SessionPrefix
from planner.simulator.simulate import simulate
from tests.ampd.policies.pools_lab import with_constants
from workloads.trace import Round, Session, SharedPrefix

MODEL = analytic_model("llama-3.1-8b", "h20")
APART = PiecewiseModel(MODEL.profile, backend="an engine whose mixed passes were not measured")
SLO = Slo(0.5, 0.02)
ORDERINGS = ("ampd", "continuum", "edf", "fcfs", "hrrn", "jct", "kairos", "laps", "shortest-prefill-first")
ROUTINGS = (
    "always-remote(choice=random)",
    "arrow",
    "deflection",
    "first-remote",
    "taichi",
    "threshold(tokens=300)",
)
SLICINGS = ("itl-chunks", "whole", "dynaserve")
NO_OPTIONS = SimulationOptions()


class RandomBinding:
    """Binds anywhere."""

    def bind(self, situation: BindingSituation) -> str:
        return situation.rng.choice(situation.decode).worker_id


class BindTo:
    """Binds to one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id

    def bind(self, situation: BindingSituation) -> str:  # noqa: ARG002
        return self._worker_id


class RandomRouting:
    """Routes anywhere."""

    def route(self, situation: RoutingSituation) -> RouteDecision:
        worker = situation.rng.choice([situation.decode, *situation.prefill])
        route = Route.LOCAL if worker is situation.decode else Route.REMOTE
        return RouteDecision(route, worker.worker_id, "dice")


class RouteBy:
    """Routes by the index of the round: remote (to the first prefill worker) where `is_remote` says so."""

    def __init__(self, is_remote: Callable[[int], bool]) -> None:
        self._is_remote = is_remote

    def policies(self) -> Policies:
        return Policies(RandomBinding(), self, create("ordering", "fcfs"))

    def route(self, situation: RoutingSituation) -> RouteDecision:
        if self._is_remote(int(situation.task.task_id.rpartition("/")[2])):
            return RouteDecision(Route.REMOTE, situation.prefill[0].worker_id, "test")
        return RouteDecision(Route.LOCAL, situation.decode.worker_id, "test")


class RandomOrdering:
    """Picks anyone."""

    def pick(self, situation: OrderingSituation) -> Pick:
        index = situation.rng.randrange(len(situation.queue))
        return Run(index, tuple(range(index)))


class DiceOrdering:
    """Any pass, and now and then a wait, mostly a tiny one."""

    def pick(self, situation: OrderingSituation) -> Pick:
        rng, count = situation.rng, len(situation.queue)
        if wait_s := rng.choice([0.0, 0.0, 1e-15, 0.05]):
            return Wait(wait_s)
        positions = rng.sample(range(count), rng.randint(1, count))
        return Run(positions[0], tuple(range(positions[0])), tuple(positions[1:]))


class RandomPools:
    """Turns anyone into anything, also the last of its role, and also into what it is."""

    is_idle = False

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        workers, rng = situation.workers, situation.rng
        chosen = rng.sample(workers, rng.randrange(len(workers) + 1))
        return [RoleChange(view.worker_id, rng.choice(list(Role)), "dice", rng.choice(["", "a"])) for view in chosen]


DICE = Policies(RandomBinding(), RandomRouting(), RandomOrdering())
RESTLESS = replace(DICE, pools=RandomPools())
AMPD = Policies(create("binding", "least-kv"), create("routing", "ampd"), create("ordering", "ampd"))
REMOTE = replace(AMPD, routing=create("routing", "always-remote"), ordering=create("ordering", "fcfs"))
LOCAL = replace(AMPD, routing=create("routing", "always-local"), ordering=create("ordering", "fcfs"))
ARROW = replace(REMOTE, pools=create("pools", "arrow", cooldown_s=0.0))
OURS = Policies(
    create("binding", "least-kv"),
    create("routing", "predictive"),
    create("ordering", "on-time"),
    create("slicing", "slack"),
)
OURS_RESTLESS = replace(OURS, pools=RandomPools())
OURS_POOLS = replace(OURS, pools=with_constants(PredictivePools, COOLDOWN_S=0.0))
OURS_LOCAL = replace(OURS, routing=LOCAL.routing)
SLICED_DICE = replace(RESTLESS, slicing=OURS.slicing)


def by(ordering: OrderingPolicy, base: Policies = REMOTE) -> Policies:
    return replace(base, ordering=ordering)


own_policies = st.sampled_from([OURS, OURS_RESTLESS, OURS_POOLS, OURS_LOCAL, SLICED_DICE])
policies = st.one_of(st.sampled_from([DICE, RESTLESS, AMPD, REMOTE, LOCAL, ARROW]), own_policies)
ordering_policies = st.builds(
    by,
    st.one_of(st.sampled_from(ORDERINGS).map(partial(create, "ordering")), st.builds(DiceOrdering)),
    st.sampled_from([DICE, REMOTE, LOCAL]),
)
routing_policies = st.builds(
    replace,
    st.just(REMOTE),
    binding=st.sampled_from(["least-kv", "arrow"]).map(partial(create, "binding")),
    routing=st.sampled_from(ROUTINGS).map(partial(create_named, "routing")),
    slicing=st.sampled_from(SLICINGS).map(partial(create_named, "slicing")),
    pools=st.sampled_from([create("pools", "static"), ARROW.pools, RandomPools()]),
)


# Strategies are made once: making them in a draw costs more than the draw.
_few_or_many = st.one_of(st.integers(1, 40), st.integers(1, 1500))
_outputs = st.one_of(st.just(1), st.integers(1, 60), st.integers(1, 400))
_cuts = st.one_of(st.none(), st.none(), st.none(), st.floats(0, 1))
_arrivals_s = st.floats(0, 2.0)


@cache
def _rounds(least_tool_s: float) -> st.SearchStrategy[list[tuple[int, int, float, float | None]]]:
    """Increment, output, tool time, and the share of the context that is kept."""
    tools_s = st.one_of(st.just(least_tool_s), st.floats(least_tool_s, 2.0))
    return st.lists(st.tuples(_few_or_many, _outputs, tools_s, _cuts), min_size=1, max_size=4)


@cache
def session_lists(most: int = 8, least_tool_s: float = 0.0) -> st.SearchStrategy[list[Session]]:
    session = st.tuples(_arrivals_s, _rounds(least_tool_s))
    return st.lists(session, min_size=1, max_size=most).map(_sessions)


def _sessions(drawn: list[tuple[float, list[tuple[int, int, float, float | None]]]]) -> list[Session]:
    sessions = []
    for number, (arrival_s, items) in enumerate(drawn):
        rounds: list[Round] = []
        context = 0
        for incr, output, tool_s, share in items:
            keep = None if share is None or not rounds else int(share * context)
            tool_s = tool_s if rounds else 0.0
            rounds.append(Round(incr_tokens=incr, output_tokens=output, tool_s=tool_s, keep_tokens=keep))
            context = (context if keep is None else keep) + incr + output
        sessions.append(Session(session_id=f"s{number}", arrival_s=arrival_s, rounds=tuple(rounds)))
    return sorted(sessions, key=lambda session: session.arrival_s)


@cache
def sharing_session_lists() -> st.SearchStrategy[list[Session]]:
    """Sessions of which some share a part of their first prompt, or all of it."""
    prefixes = st.lists(st.tuples(st.sampled_from("aab-"), st.floats(0, 1)), min_size=8, max_size=8)
    return st.tuples(session_lists(), prefixes).map(lambda drawn: [_sharing(*pair) for pair in zip(*drawn)])  # noqa: B905


def _sharing(session: Session, prefix: tuple[str, float]) -> Session:
    name, share = prefix
    tokens = round(share * session.rounds[0].incr_tokens)
    if name == "-" or not tokens:
        return session
    return session.model_copy(update={"shared_prefix": SharedPrefix(id=name, tokens=tokens)})


def _groups(capacities: st.SearchStrategy[int], least: int) -> st.SearchStrategy[tuple[ReplicaGroup, ...]]:
    group = st.builds(ReplicaGroup, st.integers(1, 3), st.sampled_from([1, 2, 4]).map(Parallelism), capacities)
    return st.lists(group, min_size=least, max_size=2).map(tuple)


def _clusters(capacities: st.SearchStrategy[int]) -> st.SearchStrategy[Cluster]:
    """Some workers own sessions: decode workers, mixed ones, or both."""
    none, some, any_ = st.just(()), _groups(capacities, 1), _groups(capacities, 0)
    split = st.builds(Cluster, some, any_)
    return st.one_of(split, split, st.builds(Cluster, any_, any_, mixed=some), st.builds(Cluster, none, mixed=some))


roomy_clusters = _clusters(st.sampled_from([0, 50_000]))
tight_clusters = _clusters(st.integers(500, 12_000))
clusters = st.one_of(roomy_clusters, tight_clusters)


options = st.builds(
    SimulationOptions,
    seed=st.integers(0, 5),
    dispatch_s=st.sampled_from([0.0, 0.003]),
    hand_over_s=st.sampled_from([0.0, 0.002]),
    kv_read_s=st.sampled_from([0.0, 0.001, 0.3]),
    hand_over_pass=st.booleans(),
    state_delay_s=st.sampled_from([0.0, 0.2]),
    coordinators=st.integers(1, 3),
    pools_interval_s=st.sampled_from([0.01, 0.1]),
    keeps_timeline=st.just(True),
)


class WatchedMemory(KvMemory):
    """Checks its books at every change, and notes which sessions it evicted."""

    def __init__(
        self,
        capacity_tokens: int,
        page_tokens: int,
        prefixes: dict[str, SessionPrefix] = NO_PREFIXES,
        store: KvStore | None = None,
    ) -> None:
        super().__init__(capacity_tokens, page_tokens, prefixes, store)
        self.given_prefixes = prefixes
        self.evicted_sessions: set[str] = set()

    def _evict(self, session_id: str) -> None:
        self.evicted_sessions.add(session_id)
        super()._evict(session_id)

    def check(self) -> None:
        assert self.used_tokens == self.counted_tokens()
        assert min([0, *self.held.values()]) == 0
        if self.capacity_tokens:
            assert self.used_tokens <= self.capacity_tokens
        assert all(name in self.held for name in self._idle)
        assert not any(name in self._reserved or name in self._protections for name in self._idle)

    def counted_tokens(self) -> int:
        """What sessions have here, with each prefix counted once, by a plain count."""
        here = {**self.held, **self._reserved}
        prefixes = {key: resident.computed_tokens for key, resident in self.prefixes._residents.items()}
        private = 0
        for name, tokens in here.items():
            key, shared = self.given_prefixes.get(name, ("", 0))
            shared = min(tokens, shared)
            private += tokens - shared
            prefixes[key] = max(prefixes.get(key, 0), shared)
        return private + sum(prefixes.values())

    def protect(self, session_id: str) -> None:
        super().protect(session_id)
        self.check()

    def unprotect(self, session_id: str) -> None:
        super().unprotect(session_id)
        self.check()

    def reserve(self, session_id: str, tokens: int) -> bool:
        assert session_id not in self._reserved, "two rounds of one session at once"
        done = super().reserve(session_id, tokens)
        self.check()
        return done

    def settle(self, session_id: str, context_tokens: int) -> None:
        super().settle(session_id, context_tokens)
        self.check()

    def release(self, session_id: str) -> None:
        assert session_id not in self._reserved, "released while it runs"
        super().release(session_id)
        self.check()

    def cut(self, session_id: str, tokens: int) -> None:
        assert session_id not in self._reserved, "cut while it runs"
        super().cut(session_id, tokens)
        self.check()


@contextmanager
def watched_memories() -> Iterator[list[WatchedMemory]]:
    """All KV memories of the simulations in the block, which check themselves."""
    memories: list[WatchedMemory] = []

    def made(*arguments: Any) -> WatchedMemory:
        memories.append(WatchedMemory(*arguments))
        return memories[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.simulator.worker.KvMemory", made)
        yield memories


def world_of(policies: Policies) -> World:
    """What an engine by itself needs."""
    return World(EventLoop(), MODEL, MODEL, policies, SLO, NO_OPTIONS, [], None)


def run(
    sessions: Sequence[Session],
    cluster: Cluster,
    policies: Policies = AMPD,
    options: SimulationOptions = NO_OPTIONS,
    model: PerformanceModel = MODEL,
) -> SimulationRun:
    return simulate(sessions, cluster, model, policies, SLO, options)


def single(theta: int = 1, capacity: int = 0, prefill: int = 1) -> Cluster:
    """One decode worker and `prefill` prefill workers."""
    group = ReplicaGroup(1, Parallelism(theta), capacity)
    return Cluster((group,), (ReplicaGroup(prefill, Parallelism(theta), capacity),) if prefill else ())


def session(name: str, *rounds: tuple[int, int], arrival_s: float = 0.0, tool_s: float = 0.5) -> Session:
    """Rounds as (increment, output)."""
    return Session(
        session_id=name,
        arrival_s=arrival_s,
        rounds=tuple(
            Round(incr_tokens=incr, output_tokens=output, tool_s=tool_s if index else 0.0)
            for index, (incr, output) in enumerate(rounds)
        ),
    )


@contextmanager
def steps_at_once(most: int) -> Iterator[None]:
    """In the block, engines plan at most this many decode steps between two events."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.simulator.engine.LONGEST_RUN_STEPS", most)
        yield
