"""Static roles against `look-ahead`, on made-up agents, at 60 % and 95 % of the rate that the start sustains.

python -m benchmarks.made_up_roles [--seeds 2] [--only writers] [--looks]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ampd.perf.presets import analytic_model
from ampd.policies import defaults
from ampd.policies.base import PoolsPolicy, PoolsSituation, RoleChange
from ampd.policies.considered import Considered
from ampd.policies.registry import create_named
from ampd.types import ATTAINMENT, Slo
from benchmarks.made_up_roles.agents import CODERS, READERS, TALKERS, TOOLS, WRITERS, Kind, arriving
from benchmarks.policies.settings import cluster_of
from benchmarks.rate_search import RateSearch
from benchmarks.sustained import in_time_share
from planner.layout.trial import IN_TIME
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulationRun
from planner.simulator.simulate import simulate

_SEARCH_SEED = 900
_PRECISION = 1.15


@dataclass(frozen=True)
class Case:
    """Agents on a cluster, with targets.

    Attributes:
        seconds: of arrivals.
        sustained: sessions per second that the start sustains, as `--capacities` finds it.
    """

    kinds: Sequence[Kind]
    model: str
    gpu: str
    prefill: str
    decode: str
    slo: Slo
    seconds: float
    sustained: float

    @property
    def name(self) -> str:
        kinds = "/".join(kind.name for kind in self.kinds)
        return f"{kinds} {self.model} {self.prefill}+{self.decode} {self.gpu}"


MIXED = (READERS, TALKERS)
CASES = (
    Case((WRITERS,), "llama-3.1-8b", "l40s", "2xTP1", "2xTP1", Slo(1.5, 0.05), 120.0, 1.875),
    Case((WRITERS,), "qwen3-32b", "h200", "1xTP2", "3xTP2", Slo(1.0, 0.03), 120.0, 11.25),
    Case((TOOLS,), "qwen3-32b", "h100", "2xTP2", "2xTP2", Slo(0.5, 0.04), 120.0, 3.354),
    Case((TOOLS,), "llama-3.1-8b", "l40s", "1xTP1", "3xTP1", Slo(0.8, 0.05), 120.0, 1.342),
    Case((CODERS,), "qwen3-32b", "h200", "2xTP2", "2xTP2", Slo(3.0, 0.05), 180.0, 0.559),
    Case((CODERS,), "llama-3.1-70b", "h100", "1xTP4", "3xTP4", Slo(3.0, 0.05), 180.0, 0.4472),
    Case(MIXED, "qwen3-32b", "h100", "2xTP2", "2xTP2", Slo(1.5, 0.04), 180.0, 2.236),
    Case(MIXED, "llama-3.1-8b", "h20", "1xTP1", "3xTP1", Slo(4.0, 0.04), 180.0, 0.6988),
)
WAYS = ("static", "look-ahead", "look-ahead, moves")
"""With `moves`, any session may move between two rounds; else as `defaults.MOVES` says."""
LOADS = (0.6, 0.95)


class Shown:
    """A pools policy whose looks and changes are printed."""

    def __init__(self, policy: PoolsPolicy) -> None:
        self._policy = policy
        self.is_idle, self.interval_s = policy.is_idle, policy.interval_s
        self.load_s, self.is_slow = policy.load_s, policy.is_slow

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        begin_s = time.perf_counter()
        found = self._policy.change(situation)
        if isinstance(found, Considered) or found:
            tried = "; ".join(f"{each.roles} {each.attained:.3f}" for each in getattr(found, "tried", ()))
            changes = ", ".join(f"{change.worker_id} {change.role} {change.reason}" for change in found)
            took_s, rounds = time.perf_counter() - begin_s, getattr(found, "rounds", 0)
            print(f"    {situation.now_s:6.1f} s: {rounds} rounds: {tried} -> {changes or '-'} ({took_s:.2f} s)")
        return found


def served(case: Case, way: str, rate: float, seed: int, *, looks: bool = False) -> SimulationRun:
    """One simulation."""
    pools, _, moves = way.partition(", ")
    policy: Any = create_named("pools", pools)
    policies = Policies(
        create_named("binding", defaults.BINDING),
        create_named("routing", defaults.ROUTING),
        create_named("ordering", defaults.ORDERING),
        create_named("slicing", defaults.SLICING),
        Shown(policy) if looks else policy,
    )
    sessions = arriving(case.kinds, rate, case.seconds, seed)
    options = SimulationOptions(seed=seed, moves="any" if moves else defaults.MOVES)
    model = analytic_model(case.model, case.gpu)
    return simulate(sessions, cluster_of(model, case.prefill, case.decode), model, policies, case.slo, options)


@dataclass(frozen=True)
class _Sustained:
    rounds: float


def capacity(case: Case) -> float:
    """The highest rate of sessions whose rounds the start sustains."""

    def attained(rate: float) -> _Sustained:
        done = served(case, "static", rate, _SEARCH_SEED)
        sessions = arriving(case.kinds, rate, case.seconds, _SEARCH_SEED)
        in_time = in_time_share(done.rounds, sessions, case.slo) >= IN_TIME
        return _Sustained(done.attainment(case.slo).rounds if in_time else 0.0)

    return RateSearch(attained, _PRECISION, lowest_rate=10 / case.seconds).highest(ATTAINMENT, "rounds", case.sustained)


def row(case: Case, ways: Sequence[str], load: float, seed: int, *, looks: bool) -> str:
    """All ways on the same sessions, as a row of a table."""
    rate, cells = case.sustained * load, list[str]()
    for way in ways:
        done = served(case, way, rate, seed, looks=looks)
        reached = done.attainment(case.slo)
        cells.append(f"{100 * reached.rounds:.1f} / {100 * reached.sessions:.1f} ({done.role_flips})")
    return " | ".join(["", f"{case.name}, {load:g} x {case.sustained:.3g}/s, seed {seed}", *cells, ""]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=901)
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="as multiples of what the start sustains")
    parser.add_argument("--only", default="", help="settings whose names contain one of these, separated by commas")
    parser.add_argument("--ways", default=";".join(WAYS), help="some of: " + "; ".join(WAYS))
    parser.add_argument("--looks", action="store_true", help="print what is considered")
    parser.add_argument("--capacities", action="store_true", help="search what the starts sustain, and nothing else")
    given = parser.parse_args()
    parts, ways = [part.strip() for part in given.only.split(",")], [way.strip() for way in given.ways.split(";")]
    cases = [case for case in CASES if any(part in case.name for part in parts)]
    if given.capacities:
        for case in cases:
            print(f"{case.name}: {capacity(case):.4g}/s", flush=True)
        return
    print(" | ".join(["", "rounds / sessions attained in % (changes)", *ways, ""]).strip())
    print("| " + "--- | " * (len(ways) + 1))
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for load in map(float, given.loads.split(",")):
            for case in cases:
                print(row(case, ways, load, seed, looks=given.looks), flush=True)


if __name__ == "__main__":
    main()
