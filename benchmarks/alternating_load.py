"""Roles under a load that changes its kind every minute: static and predictive ones, in the simulator.

Two kinds of agents take turns, each for a minute: one reads much and writes little, the other reads little and writes
much. Roles that follow the load are always a little late here, so this is the load that punishes changes most.

    python -m benchmarks.alternating_load [--seeds 3] [--minutes 8] [--rates 2.5,6] [--turn 60]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ampd.perf.presets import analytic_model
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import Parallelism, Slo
from planner.parallel import in_parallel
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.trace import Round, Session

_ITL_S = 0.04
_TP = Parallelism(2)
START = "static 2+2"
LAYOUTS = (
    "static 1+3",
    START,
    "static 3+1",
    "static co-located",
    "predictive",
    "static 2+2, moves",
    "predictive, moves",
)
"""What `--layouts` may name. With `moves`, any session may move; else as `defaults.MOVES` says."""


@dataclass(frozen=True)
class Kind:
    """A kind of agent: its rounds, and the least and most new tokens and output tokens of each."""

    name: str
    rounds: int
    incr_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def session(self, number: int, arrival_s: float, rng: random.Random) -> Session:
        """An agent of this kind, with tools that take 0.5 to 3 s."""
        rounds = [
            Round(
                incr_tokens=rng.randint(*self.incr_tokens),
                output_tokens=rng.randint(*self.output_tokens),
                tool_s=rng.uniform(0.5, 3.0) if index else 0.0,
            )
            for index in range(self.rounds)
        ]
        return Session(session_id=f"{self.name}-{number}", arrival_s=arrival_s, rounds=tuple(rounds))


READER = Kind("reader", 3, (3000, 6000), (20, 60))
WRITER = Kind("writer", 2, (100, 400), (400, 900))


def alternating(rates: tuple[float, float], turns: int, turn_s: float, seed: int) -> list[Session]:
    """Poisson arrivals: readers in even turns, writers in odd ones, at their own rates per second."""
    rng = random.Random(seed)
    sessions: list[Session] = []
    for turn in range(turns):
        kind, rate = ((READER, rates[0]), (WRITER, rates[1]))[turn % 2]
        now_s = turn * turn_s + rng.expovariate(rate)
        while now_s < (turn + 1) * turn_s:
            sessions.append(kind.session(len(sessions), now_s, rng))
            now_s += rng.expovariate(rate)
    return sessions


def attained(sessions_of: Callable[[int], list[Session]], slo: Slo, case: tuple[str, int]) -> tuple[float, float, int]:
    """(share of the rounds, share of the sessions, changes of roles) of one layout and seed."""
    layout, seed = case
    model = analytic_model("qwen3-32b", "h20")
    group = ReplicaGroup(1, _TP, model.kv_capacity_tokens(_TP) or 0)
    pools, _, moves = layout.partition(", ")
    prefill = {"static 1+3": 1, "static 3+1": 3, "static co-located": 0}.get(pools, 2)
    cluster = Cluster(
        decode=(replace(group, replicas=4 - prefill),),
        prefill=(replace(group, replicas=prefill),) if prefill else (),
    )
    policies = Policies(
        create_named("binding", defaults.BINDING),
        create_named("routing", defaults.ROUTING),
        create_named("ordering", defaults.ORDERING),
        create_named("slicing", defaults.SLICING),
        create_named("pools", pools.split()[0]),
    )
    options = SimulationOptions(seed=seed, moves="any" if moves else defaults.MOVES)
    done = simulate(sessions_of(seed), cluster, model, policies, slo, options)
    shares = done.attainment(slo)
    return shares.rounds, shares.sessions, done.role_flips


def table(
    sessions_of: Callable[[int], list[Session]],
    slo: Slo,
    seeds: int,
    jobs: int | None,
    layouts: Sequence[str] = LAYOUTS,
) -> str:
    """Means over the seeds, and the lowest difference of a seed to static 2+2, where all others but three start."""
    layouts = list(dict.fromkeys([START, *layouts]))
    cases = [(layout, seed) for layout in layouts for seed in range(seeds)]
    results = in_parallel(partial(attained, sessions_of, slo), cases, "simulating", jobs)
    by_layout = {layout: results[at * seeds : (at + 1) * seeds] for at, layout in enumerate(layouts)}
    start = by_layout[START]
    lines = [
        "| roles | rounds | sessions | changes | lowest difference to 2+2 (rounds) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for layout, outcomes in by_layout.items():
        rounds, sessions, flips = (_mean([outcome[column] for outcome in outcomes]) for column in range(3))
        lowest = min(mine[0] - theirs[0] for mine, theirs in zip(outcomes, start, strict=True))
        lines.append(f"| {layout} | {rounds:.1%} | {sessions:.1%} | {flips:.1f} | {100 * lowest:+.1f} points |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--turn", type=float, default=60.0, help="seconds until the kind changes")
    parser.add_argument("--rates", default="2.5,6", help="sessions per second of readers and of writers")
    parser.add_argument("--ttft", type=float, default=1.5, help="TTFT target in seconds")
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="some of: " + "; ".join(LAYOUTS))
    options = parser.parse_args()
    readers, writers = (float(rate) for rate in options.rates.split(","))
    layouts = [layout.strip() for layout in options.layouts.split(";")]
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"--layouts: {sorted(unknown)} are not among {'; '.join(LAYOUTS)}")
    slo = Slo(options.ttft, _ITL_S)
    turns = round(60 * options.minutes / options.turn)
    sessions_of = partial(alternating, (readers, writers), turns, options.turn)
    print(table(sessions_of, slo, options.seeds, options.jobs, layouts))


if __name__ == "__main__":
    main()
