"""What decisions gain by knowing the prefixes that sessions share, in the simulator.

In every row the KV of a shared system prompt is there once and is found by all sessions. The rows differ in what
decides: our policies with and without that knowledge, and Dynamo's router, which knows prefixes too, with the prefills
where it binds a session (aggregated) and on prefill workers.

    python -m benchmarks.shared_prefix [--trace tau-bench-airline] [--prefix-tokens 8592] [--rates 4,8,12] [--seeds 3]
    python -m benchmarks.shared_prefix --write-trace eight.jsonl     # eight agents with a prompt of 8,592 tokens

The second command writes a trace for a live graph: `ampd replay eight.jsonl --json result.json`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ampd.perf.presets import analytic_model
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import Parallelism, Slo
from planner.parallel import in_parallel
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.trace import Round, Session, SharedPrefix, load_trace, retime, write_trace

_TP = Parallelism(2)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Policies, and whether their decisions know shared prefixes."""

    name: str
    binding: str
    routing: str
    knows_prefixes: bool = True
    is_aggregated: bool = False


CONTESTANTS = (
    Contestant("ours", defaults.BINDING, defaults.ROUTING),
    Contestant("ours, prefixes unknown", defaults.BINDING, defaults.ROUTING, knows_prefixes=False),
    Contestant("ours, binding least-kv", "least-kv", defaults.ROUTING),
    Contestant("kv-router, always-remote", "kv-router", "always-remote"),
    Contestant("kv-router, aggregated", "kv-router", "always-local", is_aggregated=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one simulation: shares that met both targets, first rounds' TTFT, and the rounds called hopeless."""

    rounds: float
    sessions: float
    initial_p50_s: float
    initial_p95_s: float
    hopeless: float


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions of a benchmark and their targets."""

    sessions: tuple[Session, ...]
    count: int
    slo: Slo


def sharing(sessions: Sequence[Session], tokens: int) -> tuple[Session, ...]:
    """The sessions behind a system prompt of `tokens` tokens that all of them share."""
    return tuple(_behind(session, tokens) for session in sessions)


def _behind(session: Session, tokens: int) -> Session:
    first, *others = session.rounds
    begins = first.model_copy(update={"incr_tokens": tokens + first.incr_tokens})
    kept = [
        each if each.keep_tokens is None else each.model_copy(update={"keep_tokens": tokens + each.keep_tokens})
        for each in others
    ]
    prefix = SharedPrefix(id="system", tokens=tokens)
    return session.model_copy(update={"rounds": (begins, *kept), "shared_prefix": prefix})


def outcome(load: Load, case: tuple[Contestant, float, int]) -> Outcome:
    """One contestant at one rate with one seed, on four replicas of two GPUs."""
    contestant, rate, seed = case
    model = analytic_model("qwen3-32b", "h20")
    group = ReplicaGroup(2, _TP, model.kv_capacity_tokens(_TP) or 0)
    cluster = Cluster(decode=(group,), prefill=(group,))
    policies = Policies(
        create_named("binding", contestant.binding),
        create_named("routing", contestant.routing),
        create_named("ordering", defaults.ORDERING),
        create_named("slicing", defaults.SLICING),
    )
    done = simulate(
        retime(load.sessions, rate, seed, load.count),
        cluster.colocated() if contestant.is_aggregated else cluster,
        model,
        policies,
        load.slo,
        SimulationOptions(seed=seed, knows_prefixes=contestant.knows_prefixes),
    )
    shares, reasons = done.attainment(load.slo), Counter(record.reason for record in done.rounds)
    initial = [record.ttft_s for record in done.rounds if record.index == 0 and record.ttft_s is not None]
    p50_s, p95_s = (float(np.percentile(initial, percent)) for percent in (50, 95))
    return Outcome(shares.rounds, shares.sessions, p50_s, p95_s, reasons["hopeless"] / len(done.rounds))


def table(load: Load, rates: Sequence[float], seeds: int, jobs: int | None) -> str:
    """The means over the seeds, a row per contestant and rate."""
    cases = [(each, rate, seed) for rate in rates for each in CONTESTANTS for seed in range(seeds)]
    found = in_parallel(partial(outcome, load), cases, "simulating", jobs)
    lines = [
        "| sessions/s | decisions | rounds | sessions | first TTFT P50 / P95 | hopeless |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for at in range(0, len(cases), seeds):
        contestant, rate, _ = cases[at]
        of_seeds = found[at : at + seeds]
        rounds, sessions, p50_s, p95_s, hopeless = (
            sum(getattr(each, name) for each in of_seeds) / seeds for name in Outcome.__slots__
        )
        lines.append(
            f"| {rate:g} | {contestant.name} | {rounds:.1%} | {sessions:.1%} "
            f"| {1e3 * p50_s:.0f} / {1e3 * p95_s:.0f} ms | {hopeless:.1%} |"
        )
    return "\n".join(lines)


def eight_agents() -> list[Session]:
    """Eight agents with a system prompt of 8,592 tokens, 15 tokens of their own, and two more short rounds."""
    rounds = [Round(incr_tokens=15, output_tokens=8), *[Round(incr_tokens=40, output_tokens=8, tool_s=1.0)] * 2]
    agents = [Session(session_id=f"agent-{at}", arrival_s=12.0 * at, rounds=tuple(rounds)) for at in range(8)]
    return list(sharing(agents, 8592))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="tau-bench-airline")
    parser.add_argument("--prefix-tokens", type=int, default=8592, help="put before each session's first prompt")
    parser.add_argument("--rates", default="4,8,12")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=0.5)
    parser.add_argument("--itl", type=float, default=0.04)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--write-trace", type=Path)
    given = parser.parse_args()
    if given.write_trace:
        write_trace(eight_agents(), given.write_trace)
        return
    sessions = sharing(load_trace(given.trace), given.prefix_tokens)
    load = Load(sessions, given.sessions, Slo(given.ttft, given.itl))
    print(table(load, [float(rate) for rate in given.rates.split(",")], given.seeds, given.jobs))


if __name__ == "__main__":
    main()
