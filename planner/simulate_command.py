"""`ampd simulate`: how a cluster would serve a trace, for every combination of the named policies and rates."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.base import split_names
from ampd.policies.registry import KINDS, create_named
from ampd.reports import counted, format_share
from ampd.settings import has_usual_size, parse_settings
from ampd.types import MAX_WAIT, Moves, Slo
from planner.case_settings import CaseSettings, Combination, Limit, Mode, misfits, papers_note, provenance_of
from planner.parallel import in_parallel
from planner.simulator.options import Cluster, Policies, SimulationOptions, started
from planner.simulator.outcome import SimulationRun, write_timeline
from planner.simulator.simulate import simulate
from workloads.report import series_of
from workloads.results import local_share
from workloads.trace import Session, load_trace, retime

PROG = "ampd simulate"


class SimulateSettings(CaseSettings):
    """Simulate how a cluster serves a trace of agent sessions."""

    topics: ClassVar = {
        "workers": "replicas",
        "mode": "policies",
        "rate": "times, limits and moves",
        "jobs": "processes and results",
    }

    workers: str | None = Field(
        None,
        description="Replicas whose roles follow the load (--pools), as 4xTP2; instead of --prefill and --decode, "
        "which say in which roles they start.",
    )
    prefill: str | None = Field(
        None,
        description="Prefill replicas, as 2xTP4 (or 2x4) or 2xTP4,1xTP8; 0: none. Default: 1xTP1, with --mixed none.",
    )
    decode: str | None = Field(
        None,
        description="Decode replicas, as 2xTP4 (or 2x4) or 2xTP4,1xTP8; 0: none. Default: 1xTP1, with --mixed none.",
    )
    mixed: str = Field(
        "0",
        description="Mixed replicas, as 4xTP2, which own sessions and also prefill for others; 0: none.",
    )
    mode: str = Field(
        "disaggregated",
        description="Comma-separated: disaggregated (the named policies), always-remote (fcfs), colocated "
        "(fcfs and whole prefills unless named).",
    )
    routing: str = Field(
        defaults.ROUTING,
        description="Routing policies, comma-separated; ampd(alpha=0.8) sets a parameter.",
    )
    ordering: str = Field(defaults.ORDERING, description="Ordering policies, comma-separated.")
    binding: str = Field(defaults.BINDING, description="Binding policy.")
    slicing: str = Field(
        defaults.SLICING,
        description="Slicing policies, comma-separated: what an engine computes next.",
    )
    pools: str = Field(defaults.POOLS, description="Pools policies, comma-separated: when replicas change their roles.")
    rate: str | None = Field(
        None, description="Session arrivals per second (Poisson), comma-separated; default: the trace's own arrivals."
    )
    gpus_per_host: int = Field(
        0,
        ge=0,
        description="GPUs of a host, whose workers load each other's KV in place. 0: all KV goes over the network.",
    )
    max_wait: float = Field(
        MAX_WAIT,
        ge=0,
        description="Longest predicted wait of a round in TTFT targets; refused rounds come back. 0: no refusals.",
    )
    moves: Moves = Field(
        defaults.MOVES,
        description="Sessions that may move to another owner between two rounds: as of a coordinator.",
    )
    jobs: int | None = Field(None, ge=1, description="Number of processes; default: one per core.")
    report: Path | None = Field(None, description="Write an HTML report to this file.")
    timeline: Path | None = Field(None, description="Write the activity of every worker as a Chrome trace (Perfetto).")

    def options(self) -> SimulationOptions:
        """The simulator's options, which are called like the flags."""
        return SimulationOptions(**self.model_dump(include={field.name for field in fields(SimulationOptions)}))


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that the simulations of a call share."""

    sessions: tuple[Session, ...]
    limit: int | None
    cluster: Cluster
    model: PiecewiseModel
    binding: str
    slo: Slo
    options: SimulationOptions

    def cluster_of(self, combination: Combination) -> Cluster:
        """The cluster as the mode of a combination uses it."""
        return self.cluster.colocated() if combination.mode is Mode.COLOCATED else self.cluster


def run(argv: Sequence[str]) -> int:
    """Run the simulations; 1 if not a single round could be served.

    Raises:
        UserError: wrong flags, an unknown name, a trace that cannot be read.
    """
    settings = parse_settings(SimulateSettings, argv, PROG)
    check_writable(settings.report, settings.timeline)
    scene, combinations = case_of(settings, load_trace(settings.trace, settings.limit))
    scene = replace(scene, options=replace(scene.options, keeps_timeline=settings.timeline is not None))
    runs = in_parallel(partial(run_combination, scene), combinations, "simulating", settings.jobs)
    results = [result_of(scene, combination, run_) for combination, run_ in zip(combinations, runs, strict=True)]
    common = {
        "kind": "simulation",
        "trace": settings.trace,
        "seed": settings.seed,
        "performance_model": provenance_of(scene.model),
        "note": papers_note(combinations),
    }
    whole = (results[0] if len(results) == 1 else {}) | common | {"results": results}
    # Before the files: if one cannot be written, the results are not lost.
    names = [combination.label for combination in combinations]
    print(
        json.dumps(whole, indent=1) if settings.as_json else _table(names, results, scene, papers_note(combinations)),
        flush=True,
    )
    if settings.timeline:
        write_timeline(runs[0], settings.timeline)
    if settings.report:
        from planner.reports import write_simulation_report

        write_simulation_report(settings.report, whole)
    if not any(result["rounds"] for result in results):
        _print_error(runs[0])
        return 1
    return 0


def case_of(settings: SimulateSettings, sessions: Sequence[Session]) -> tuple[Scene, list[Combination]]:
    """What a call simulates. Sessions that do not fit are named on stderr.

    Raises:
        UserError: the settings do not go together, or have an unknown name.
    """
    scene, combinations = _scene(settings, sessions), _combinations(settings)
    _require_prefill(scene.cluster, combinations)
    _warn(scene)
    return scene, combinations


def _warn(scene: Scene) -> None:
    """Name the sessions that do not fit."""
    cluster = scene.cluster
    capacities = [group.kv_capacity_tokens for group in (*cluster.decode, *cluster.mixed)]
    limit = Limit.of(cluster.max_context_tokens, max(capacities) if all(capacities) else 0)
    if line := misfits(scene.sessions, limit):
        print(f"{PROG}: {line} (give --context, another model, or more GPUs per replica)", file=sys.stderr)


def run_combination(scene: Scene, combination: Combination) -> SimulationRun:
    policies = Policies(
        create_named("binding", scene.binding),
        create_named("routing", combination.routing),
        create_named("ordering", combination.ordering),
        create_named("slicing", combination.slicing),
        create_named("pools", combination.pools),
    )
    cluster = scene.cluster_of(combination)
    sessions = retime(scene.sessions, combination.rate, scene.options.seed, scene.limit)
    return simulate(sessions, cluster, scene.model, policies, scene.slo, scene.options)


def _scene(settings: SimulateSettings, sessions: Sequence[Session]) -> Scene:
    model = settings.performance_model()
    cluster = _cluster(settings, model)
    prefill, decode = ([group.parallelism for group in groups] for groups in (cluster.prefill, cluster.decode))
    mixed = [group.parallelism for group in cluster.mixed]
    named = {kind: [create_named(kind, name) for name in split_names(getattr(settings, kind))] for kind in KINDS}
    if all(pools.is_idle for pools in named["pools"]):
        model.require([*prefill, *mixed], [*decode, *mixed])
    else:
        every = [*prefill, *decode, *mixed]
        model.require(every, every)  # each may get any role
    return Scene(tuple(sessions), settings.limit, cluster, model, settings.binding, settings.slo, settings.options())


def _cluster(settings: SimulateSettings, model: PiecewiseModel) -> Cluster:
    if settings.workers is not None:
        if given := sorted({"prefill", "decode", "mixed"} & settings.model_fields_set):
            raise UserError(f"--{given[0]}: --workers are replicas of any role; leave out one of the two flags")
        workers = settings.group(settings.workers, "--workers", model)
        if not workers:
            raise UserError("--workers: at least one replica is needed, as in 1xTP4")
        prefill, decode = started(workers)
        return Cluster(decode, prefill, model.profile.max_context_tokens or 0)
    mixed = settings.group(settings.mixed, "--mixed", model)
    default = "0" if mixed else "1xTP1"
    cluster = Cluster(
        prefill=settings.group(default if settings.prefill is None else settings.prefill, "--prefill", model),
        decode=settings.group(default if settings.decode is None else settings.decode, "--decode", model),
        max_context_tokens=model.profile.max_context_tokens or 0,
        mixed=mixed,
    )
    if not cluster.decode and not cluster.mixed:
        raise UserError("--decode: at least one decode replica is needed, as in 1xTP4, or a mixed one (--mixed)")
    return cluster


def _combinations(settings: SimulateSettings) -> list[Combination]:
    try:
        modes = [Mode(name) for name in split_names(settings.mode)]
    except ValueError:
        raise UserError(f"--mode: known are {', '.join(Mode)} (given: {settings.mode!r})") from None
    _require_use(settings, modes)
    routings, pools = split_names(settings.routing), split_names(settings.pools)
    orderings, slicings = _named_or_own(settings, "ordering"), _named_or_own(settings, "slicing")
    choices = product(modes, routings, orderings, slicings, pools, parse_rates(settings.rate))
    found = [Combination.of(*choice) for choice in choices]
    if not found:
        raise UserError("--mode, --routing, --ordering, --slicing, --pools: name at least one each")
    return list(dict.fromkeys(found))


def _require_use(settings: SimulateSettings, modes: Sequence[Mode]) -> None:
    """Refuse a policy that a flag or a variable names and no mode of the call would run."""
    for kind in sorted(Mode.DISAGGREGATED.named_kinds & settings.model_fields_set):
        if modes and not any(kind in mode.named_kinds for mode in modes):
            raise UserError(
                f"--{kind}: mode {' and '.join(modes)} would not use it; leave it out, or name --mode disaggregated "
                "too (with --prefill 0 that is co-located serving with all named policies)"
            )


def _named_or_own(settings: SimulateSettings, kind: str) -> Sequence[str | None]:
    """The policies that a flag or a variable names; (None,) without one: each mode then has its own."""
    return split_names(getattr(settings, kind)) if kind in settings.model_fields_set else (None,)


def _require_prefill(cluster: Cluster, combinations: Sequence[Combination]) -> None:
    """Refuse `always-remote` where no worker takes prefills: every round would be local."""
    if any(each.mode is Mode.ALWAYS_REMOTE for each in combinations) and not cluster.prefill and not cluster.mixed:
        raise UserError(
            "--prefill: mode always-remote needs a prefill replica, as in 1xTP4; without one use --mode colocated"
        )


def parse_rates(text: str | None) -> list[float | None]:
    """Rates of a comma-separated list; None: the trace's own arrivals.

    Raises:
        UserError: a part is no positive number.
    """
    if text is None:
        return [None]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") and has_usual_size(rate) for rate in rates):
        raise UserError(f"--rate: give positive numbers of sessions per second, as 0.8,1.6 (given: {text!r})")
    return list(rates)


def result_of(scene: Scene, combination: Combination, simulated: SimulationRun) -> dict[str, Any]:
    cluster = scene.cluster_of(combination)
    return {
        "label": combination.label,
        "mode": str(combination.mode),
        "routing": combination.routing,
        "ordering": combination.ordering,
        "binding": scene.binding,
        **combination.named,
        "rate": combination.rate,
        "cluster": str(cluster),
        "gpus": cluster.gpus,
        **simulated.result(scene.slo, scene.model.profile.kv_bytes_per_token),
        "workers": _workers(simulated),
        "series": series_of([each.as_recorded() for each in simulated.rounds], scene.slo),
    }


def _workers(simulated: SimulationRun) -> list[dict[str, Any]]:
    """The share of the run in which each worker computed, by kind."""
    return [
        {"worker": name, **{kind: seconds / (simulated.duration_s or 1.0) for kind, seconds in busy_s.items()}}
        for name, busy_s in simulated.busy_s.items()
    ]


def _table(names: Sequence[str], results: Sequence[dict[str, Any]], scene: Scene, note: str) -> str:
    """One row per combination, times in milliseconds."""
    width, slo = max(map(len, names)), scene.slo
    lines = [
        # A degree may be given without its TP (1x8), so the table shows how the flags were read.
        f"{scene.cluster}: {counted(scene.cluster.gpus, 'GPU')}, {counted(results[0]['sessions'], 'session')}",
        f"targets: TTFT {slo.ttft_s * 1e3:g} ms, ITL {slo.itl_s * 1e3:g} ms; times in ms, as mean / P95",
        "",
        f"{'':{width}}  {'rate':>6}  {'attained':>15}  {'TTFT initial':>15}  {'incremental':>15}  {'ITL':>11}  "
        f"{'local':>5}  {'errors':>6}",
    ]
    for name, result in zip(names, results, strict=True):
        reached = result["attainment"]
        cells = [
            f"{result['rate'] or '-':>6}",
            f"{format_share(reached['rounds']):>6} / {format_share(reached['sessions']):>6}",
            f"{_pair(result['ttft_initial_s']):>15}",
            f"{_pair(result['ttft_incremental_s']):>15}",
            f"{_pair(result['itl_s'], 1):>11}",
            f"{format_share(local_share(result), 0):>5}",
            f"{result['errors']:>6}",
        ]
        lines.append("  ".join([f"{name:{width}}", *cells]))
    lines += ["", "attained: share of rounds / of sessions that met both targets"]
    return "\n".join([*lines, note] if note else lines)


def _pair(values: dict[str, float | None], digits: int = 0) -> str:
    mean, p95 = values["mean"], values["p95"]
    return "-" if mean is None or p95 is None else f"{mean * 1e3:.{digits}f} / {p95 * 1e3:.{digits}f}"


def _print_error(simulated: SimulationRun) -> None:
    error = next((record.error for record in simulated.rounds if record.error), "no round was sent")
    print(f"{PROG}: no round could be served: {error}", file=sys.stderr)
