"""The AMPD paper's evaluation (arXiv 2602.14516) in our simulator: 3 models, 4 traces, 5 rates on H20, ablations.

    python -m benchmarks.reproduction [--data FILE.json] [--seeds 3] [--sessions 300]

Prints the tables of benchmarks/results/reproduction.md, from which docs/reproduction.md draws its conclusions. Both
readings of the paper's lengths (totals of a session, means of a round) are run. The layouts split the GPUs evenly: half
prefill, half decode replicas of TP 4; co-located systems have the same replicas doing both phases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model
from ampd.policies.registry import create
from ampd.types import Parallelism, Slo
from benchmarks import markdown_table
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.trace_command import Lengths, generate

GPU = "h20"
TP = 4
RATES = (0.8, 1.2, 1.6, 2.0, 2.4)
GPUS = {"toolbench": 8, "gaia": 32, "hotpotqa": 8, "dureader": 16}
SLOS_MS = {
    "qwen3-32b": {"toolbench": (350, 40), "gaia": (1000, 35), "hotpotqa": (450, 30), "dureader": (1200, 40)},
    "llama-3.1-70b": {"toolbench": (1000, 50), "gaia": (1500, 35), "hotpotqa": (2500, 45), "dureader": (5000, 50)},
    "mixtral-8x7b": {"toolbench": (130, 30), "gaia": (350, 20), "hotpotqa": (150, 25), "dureader": (300, 50)},
}
"""TTFT and ITL targets of the paper, per model and trace."""


@dataclass(frozen=True)
class System:
    """One way to serve: how replicas are used and which policies decide."""

    label: str
    routing: str = "ampd"
    ordering: str = "ampd"
    is_colocated: bool = False
    routing_parameters: tuple[tuple[str, float], ...] = ()
    ordering_parameters: tuple[tuple[str, float], ...] = ()


AMPD = System("AMPD")
ALWAYS_REMOTE = System("always-remote", routing="always-remote", ordering="fcfs")
COLOCATED = System("co-located", routing="always-local", ordering="fcfs", is_colocated=True)
CONTINUUM = System("co-located, Continuum", routing="always-local", ordering="continuum", is_colocated=True)
SYSTEMS = (AMPD, ALWAYS_REMOTE, COLOCATED, CONTINUUM)
"""Rivals of the paper: Dynamo, vLLM, vLLM-Continuum."""

ABLATION = (
    ALWAYS_REMOTE,
    System("reordering only", routing="always-remote"),
    System("routing only", ordering="fcfs"),
    AMPD,
)
WINDOWS = tuple(System(f"w = {w}", ordering_parameters=(("window", w),)) for w in (1, 2, 3, 4, 5, 8, 32))
ALPHAS = tuple(
    System(f"alpha = {value}", routing_parameters=(("alpha", value),)) for value in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
)
BETAS = tuple(
    System(f"beta = {value}", routing_parameters=(("beta", value),)) for value in (0.3, 0.5, 0.7, 0.85, 1.0, 1.2)
)


@dataclass(frozen=True)
class Case:
    """One simulation."""

    model: str
    trace: str
    lengths: str
    rate: float
    system: System
    seed: int
    sessions: int


@dataclass(frozen=True)
class Outcome:
    """What a table needs of a simulation."""

    attainment: float
    local_share: float
    ttft_p95_s: float
    itl_p95_s: float


@dataclass
class Study:
    """All outcomes, by case."""

    outcomes: dict[Case, Outcome] = field(default_factory=dict)

    def mean(self, key: str, **fields: Any) -> float:
        """Mean of one figure over the cases with these fields."""
        values = [
            getattr(outcome, key)
            for case, outcome in self.outcomes.items()
            if all(getattr(case, name) == value for name, value in fields.items())
        ]
        return statistics.fmean(values)


def main() -> int:
    options = _options()
    cases = list(dict.fromkeys(_cases(options.seeds, options.sessions)))
    study = Study()
    context = get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        results = pool.map(run_case, cases, chunksize=4)
        for case, outcome in tqdm(zip(cases, results, strict=True), total=len(cases), file=sys.stderr, disable=None):
            study.outcomes[case] = outcome
    if options.data:
        rows = [asdict(case) | asdict(outcome) for case, outcome in study.outcomes.items()]
        options.data.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(tables(study)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="JSON file for all outcomes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=300, help="sessions per simulation")
    parser.add_argument("--jobs", type=int, default=None, help="processes; default: one per core")
    return parser.parse_args()


def _cases(seeds: int, sessions: int) -> Iterator[Case]:
    for seed in range(seeds):
        for model, targets in SLOS_MS.items():
            for trace in targets:
                for lengths in Lengths:
                    for rate in RATES:
                        for system in SYSTEMS:
                            yield Case(model, trace, lengths, rate, system, seed, sessions)
        for trace in ("dureader", "gaia"):
            for lengths in Lengths:
                for system in (*ABLATION, *WINDOWS, *ALPHAS, *BETAS):
                    yield Case("llama-3.1-70b", trace, lengths, 2.0, system, seed, sessions)


# -- one simulation


def run_case(case: Case) -> Outcome:
    """Simulate one case."""
    model = _model(case.model)
    sessions = list(generate(case.trace, case.sessions, case.rate, case.seed, Lengths(case.lengths)))
    system, slo = case.system, slo_of(case.model, case.trace)
    policies = Policies(
        create("binding", "least-kv"),
        create("routing", system.routing, **dict(system.routing_parameters)),
        create("ordering", system.ordering, **dict(system.ordering_parameters)),
    )
    # The paper's engines hand a prefilled round over without another pass, and its sessions stay where they are bound.
    options = SimulationOptions(seed=case.seed, hand_over_pass=False, moves="never")
    run = simulate(sessions, cluster_of(model, case.trace, system), model, policies, slo, options)
    result = run.result(slo)
    routed = sum(result["routes"].values())
    return Outcome(
        result["attainment"]["rounds"],
        result["routes"]["local"] / routed if routed else 0.0,
        result["ttft_s"]["p95"],
        result["itl_s"]["p95"],
    )


@cache
def _model(name: str) -> PiecewiseModel:
    return analytic_model(name, GPU)


def slo_of(model: str, trace: str) -> Slo:
    """The paper's targets."""
    ttft_ms, itl_ms = SLOS_MS[model][trace]
    return Slo(ttft_ms / 1e3, itl_ms / 1e3)


def cluster_of(model: PiecewiseModel, trace: str, system: System) -> Cluster:
    """Half of the trace's GPUs for each phase, or all of them for both."""
    theta = Parallelism(TP)
    group = ReplicaGroup(GPUS[trace] // TP // 2, theta, model.kv_capacity_tokens(theta) or 0)
    cluster = Cluster(decode=(group,), prefill=(group,))
    return cluster.colocated() if system.is_colocated else cluster


# -- tables


def tables(study: Study) -> Iterator[str]:
    """The Markdown of all tables."""
    for lengths in Lengths:
        yield f"## Attainment of rounds over the session rate, lengths {lengths}"
        yield _attainment_table(study, lengths)
        yield f"## AMPD against each rival, lengths {lengths}"
        yield _gain_table(study, lengths)
    yield "## Ablation: Llama-3.1-70B, 2 sessions/s"
    yield _system_table(study, ABLATION)
    for title, systems in (("The window w", WINDOWS), ("alpha", ALPHAS), ("beta", BETAS)):
        yield f"## {title}: Llama-3.1-70B, 2 sessions/s"
        yield _system_table(study, systems)


def _attainment_table(study: Study, lengths: Lengths) -> str:
    rows = []
    for model, targets in SLOS_MS.items():
        for trace in targets:
            for system in SYSTEMS:
                fields = {"model": model, "trace": trace, "lengths": lengths, "system": system}
                cells = [f"{study.mean('attainment', rate=rate, **fields):.1%}" for rate in RATES]
                rows.append([model, trace, system.label, *cells, f"{study.mean('local_share', **fields):.0%}"])
    return markdown_table.table(["model", "trace", "system", *(f"{rate}/s" for rate in RATES), "local"], rows)


def _gain_table(study: Study, lengths: Lengths) -> str:
    """Mean over the rates of attainment, AMPD's relative to each rival's."""
    rows = []
    gains: dict[str, list[float]] = {system.label: [] for system in SYSTEMS[1:]}
    for model, targets in SLOS_MS.items():
        for trace in targets:
            fields = {"model": model, "trace": trace, "lengths": lengths}
            ours = study.mean("attainment", system=AMPD, **fields)
            row = [model, trace, f"{ours:.1%}"]
            for system in SYSTEMS[1:]:
                theirs = study.mean("attainment", system=system, **fields)
                gains[system.label].append(ours / theirs - 1 if theirs else float("inf"))
                row.append(_signed(gains[system.label][-1]))
            rows.append(row)
    finite = {label: [gain for gain in values if gain < float("inf")] for label, values in gains.items()}
    rows.append(["mean", "", "", *(_signed(statistics.fmean(values)) for values in finite.values())])
    return markdown_table.table(["model", "trace", "AMPD", *(f"vs {system.label}" for system in SYSTEMS[1:])], rows)


def _system_table(study: Study, systems: Sequence[System]) -> str:
    columns = [(trace, lengths) for trace in ("dureader", "gaia") for lengths in Lengths]
    rows = []
    for system in systems:
        row = [system.label]
        for trace, lengths in columns:
            fields = {"model": "llama-3.1-70b", "trace": trace, "lengths": lengths, "rate": 2.0, "system": system}
            row.append(f"{study.mean('attainment', **fields):.1%} ({study.mean('local_share', **fields):.0%} local)")
        rows.append(row)
    return markdown_table.table(["", *(f"{trace}, {lengths}" for trace, lengths in columns)], rows)


def _signed(gain: float) -> str:
    return "from 0" if gain == float("inf") else f"{gain:+.0%}"


if __name__ == "__main__":
    sys.exit(main())
