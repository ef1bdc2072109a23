"""One contestant in one setting: its goodput, and what its rounds looked like there."""

from __future__ import annotations

from dataclasses import dataclass

from ampd.policies.registry import create_named
from benchmarks.policies.settings import Setting
from planner.goodput import RateSearch
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate
from workloads.results import Attainment


@dataclass(frozen=True)
class Contestant:
    """Policies by name, with parameters in parentheses."""

    label: str
    routing: str
    ordering: str = "fcfs"
    slicing: str = "whole"
    pools: str = "static"
    binding: str = "least-kv"
    is_colocated: bool = False

    def policies(self) -> Policies:
        return Policies(
            create_named("binding", self.binding),
            create_named("routing", self.routing),
            create_named("ordering", self.ordering),
            create_named("slicing", self.slicing),
            create_named("pools", self.pools),
        )


@dataclass(frozen=True)
class Goodput:
    """Highest rates in sessions per second with the target share of rounds, and of sessions, attained."""

    rounds: float
    sessions: float


def run(
    setting: Setting, contestant: Contestant, rate: float, seed: int, options: SimulationOptions | None = None
) -> SimulationRun:
    """One simulation."""
    cluster = setting.cluster()
    return simulate(
        setting.sessions(rate, seed),
        cluster.colocated() if contestant.is_colocated else cluster,
        setting.performance_model(),
        contestant.policies(),
        setting.slo,
        options or SimulationOptions(seed=seed),
    )


def goodput(setting: Setting, contestant: Contestant, seed: int, start_rate: float, target: float = 0.9) -> Goodput:
    """Search both criteria with shared simulations."""

    def attained(rate: float) -> Attainment:
        return run(setting, contestant, rate, seed).attainment(setting.slo)

    search = RateSearch(attained)
    rounds = search.highest(target, "rounds", start_rate)
    return Goodput(rounds, search.highest(target, "sessions", rounds or start_rate))
