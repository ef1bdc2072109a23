"""One contestant in one setting: its goodput, and what its rounds looked like there."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ampd.perf.model import PerformanceModel, ScaledModel
from ampd.policies.base import parse_named
from ampd.policies.registry import create, create_named
from ampd.types import ATTAINMENT, Moves
from benchmarks.policies.arrivals import POISSON, rearranged
from benchmarks.policies.settings import Setting
from benchmarks.rate_search import RateSearch
from benchmarks.sustained import in_time_share, out_of_reach
from planner.layout.trial import IN_TIME
from planner.simulator.options import Cluster, Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate
from workloads.results import Attainment, attainment, meets
from workloads.trace import Session

TARGET = ATTAINMENT
"""Share of the rounds, or of the sessions, that goodput asks for."""
CRITERIA = ("sustained_rounds", "sustained_sessions")
"""The criteria of the search.

Plain goodput means little: a starved session misses one round and attains all later ones.
"""


@dataclass(frozen=True)
class Contestant:
    """Policies by name, with parameters in parentheses.

    Attributes:
        is_fitted: its routing is a table that is fitted for every setting.
        are_mixed: the setting's prefill workers are mixed workers.
        are_all_mixed: all workers of the setting are mixed workers.
        moves: which sessions may move to another owner between two rounds. Those of rivals stay.
    """

    label: str
    routing: str
    ordering: str = "fcfs"
    slicing: str = "whole"
    pools: str = "static"
    binding: str = "least-kv"
    is_colocated: bool = False
    is_fitted: bool = False
    are_mixed: bool = False
    are_all_mixed: bool = False
    moves: Moves = "never"

    def policies(self, table: str | None = None) -> Policies:
        """The policy objects; `table`: the file of a fitted one."""
        name, written = parse_named(self.routing)
        return Policies(
            create_named("binding", self.binding),
            create("routing", name, **written, **({"table": table} if self.is_fitted else {})),
            create_named("ordering", self.ordering),
            create_named("slicing", self.slicing),
            create_named("pools", self.pools),
        )

    @property
    def is_unsplit(self) -> bool:
        """All workers have the same role, so that splits of the workers make no difference."""
        return self.is_colocated or self.are_all_mixed

    @property
    def spec(self) -> str:
        """All that it is made of, whatever it is called."""
        parts = [self.routing, self.ordering, self.slicing, self.pools, self.binding]
        parts += ["co-located"] * self.is_colocated + ["fitted"] * self.is_fitted + ["mixed"] * self.are_mixed
        parts += ["all mixed"] * self.are_all_mixed
        parts += [f"moves {self.moves}"] * (self.moves != "never")
        return "/".join(parts)

    def cluster(self, cluster: Cluster) -> Cluster:
        """The setting's cluster as it uses it."""
        if self.is_colocated:
            return cluster.colocated()
        if self.are_all_mixed:
            return replace(cluster, prefill=(), decode=(), mixed=cluster.colocated().decode)
        return replace(cluster, prefill=(), mixed=cluster.prefill) if self.are_mixed else cluster


_KEPT = "kept-"


@dataclass(frozen=True)
class Condition:
    """What is unusual in a run.

    Attributes:
        arrivals: `poisson`, or a kind of recorded ones.
        belief: what the policies take the model's times for: a factor, or `random` for one in 0.7 .. 1.3 of its own
            for prefill, decode and transfer, by the seed. Workers correct it by what they measure, unless `kept-`
            stands before it.
    """

    name: str = "usual"
    arrivals: str = POISSON
    belief: str = "1"
    state_delay_s: float = 0.0
    coordinators: int = 1

    def options(self, seed: int) -> SimulationOptions:
        return SimulationOptions(
            seed=seed,
            state_delay_s=self.state_delay_s,
            coordinators=self.coordinators,
            corrects_times=not self.belief.startswith(_KEPT),
        )

    def believed(self, model: PerformanceModel, seed: int) -> PerformanceModel:
        """What the policies decide with."""
        belief = self.belief.removeprefix(_KEPT)
        if belief == "1":
            return model
        if belief == "random":
            rng = random.Random(f"{seed}/belief")
            return ScaledModel(model, *(rng.uniform(0.7, 1.3) for _ in range(3)))
        return ScaledModel(model, *(float(belief),) * 3)


USUAL = Condition()


@dataclass(frozen=True)
class Point:
    """What came of one simulation.

    Attributes:
        rounds, sessions: shares attained.
        in_time: share of the sessions that ended within `TIME_FACTOR` times their time at the targets.
        completed: rounds per second that ended between the first and the last arrival.
        attained: rounds per second of these that met their targets.
        local: share of the prefills that ran on decode workers.
        role_changes: how often a worker changed its role.
    """

    rounds: float
    sessions: float
    in_time: float
    completed: float
    attained: float
    local: float
    role_changes: float = 0.0

    @property
    def sustained_rounds(self) -> float:
        """`rounds`, or 0 where sessions are left behind: starving some of them is no way to serve the others."""
        return self.rounds if self.in_time >= IN_TIME else 0.0

    @property
    def sustained_sessions(self) -> float:
        """`sessions`, or 0 likewise."""
        return self.sessions if self.in_time >= IN_TIME else 0.0


@dataclass
class Found:
    """Goodput by criterion in sessions per second, and all rates tried on the way."""

    goodput: dict[str, float] = field(default_factory=dict)
    points: dict[float, Point] = field(default_factory=dict)


def run(
    setting: Setting,
    contestant: Contestant,
    rate: float,
    seed: int,
    condition: Condition = USUAL,
    table: str | None = None,
) -> tuple[Sequence[Session], SimulationRun]:
    """One simulation, and what was asked of it."""
    cluster, model = setting.cluster(), setting.performance_model()
    sessions = rearranged(setting.sessions(rate, seed), condition.arrivals, rate, seed)
    return sessions, simulate(
        sessions,
        contestant.cluster(cluster),
        model,
        contestant.policies(table),
        setting.slo,
        replace(condition.options(seed), moves=contestant.moves),
        belief=condition.believed(model, seed),
    )


def reached(setting: Setting, sessions: Sequence[Session], done: SimulationRun) -> Attainment:
    """The attainment of a run, without the rounds and sessions that are out of every policy's reach."""
    model = setting.performance_model()
    degrees = [group.parallelism for group in setting.cluster().colocated().decode]
    lost = {each.session_id: out_of_reach(each, model, degrees, setting.slo) for each in sessions}
    rounds = [record for record in done.rounds if record.index not in lost[record.session_id]]
    planned = {name: count for name, count in done.rounds_planned.items() if not lost[name]}
    return attainment(rounds, planned, setting.slo)


def measure(setting: Setting, sessions: Sequence[Session], done: SimulationRun) -> Point:
    """The figures of a run."""
    slo, shares = setting.slo, reached(setting, sessions, done)
    until_s = sessions[-1].arrival_s
    ended = [record for record in done.rounds if record.error is None and record.ended_s <= until_s]
    routed = [record.route for record in done.rounds if record.route is not None]
    return Point(
        rounds=shares.rounds,
        sessions=shares.sessions,
        in_time=in_time_share(done.rounds, sessions, slo),
        completed=len(ended) / until_s,
        attained=sum(meets(each, slo) for each in ended) / until_s,
        local=sum(route == "local" for route in routed) / len(routed) if routed else 0.0,
        role_changes=done.role_flips,
    )


def find(
    setting: Setting,
    contestant: Contestant,
    seed: int,
    start: Mapping[str, float],
    first_step: float,
    condition: Condition = USUAL,
    table: str | None = None,
    criteria: Sequence[str] = CRITERIA,
) -> Found:
    """Search all criteria with shared simulations; `start`: by criterion, where to begin."""

    def attained(rate: float) -> Point:
        return measure(setting, *run(setting, contestant, rate, seed, condition, table))

    search = RateSearch(attained, first_step=first_step)
    goodput: dict[str, float] = {}
    for criterion in criteria:
        goodput[criterion] = search.highest(TARGET, criterion, start[criterion])
    return Found(goodput, search.tried)


def fields_of(point: Point) -> dict[str, Any]:
    """For a JSON object, rounded."""
    return {name: round(value, 5) for name, value in vars(point).items()}
