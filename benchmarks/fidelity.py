"""How far the simulator is from the live graph: the same trace and policies, the fitted model of the same engines.

    python benchmarks/fidelity.py [--engine sglang|modelled] [--perf FILE] [--runs 5] [--json]

1. The performance model: `--perf`, or for SGLang what `ampd profile` measures now on this machine.
2. A graph starts with that model. Sessions one after the other calibrate what the model does not contain: the way from
   the client to a queue (`dispatch_s`) and from a first token to the decode worker's read (`hand_over_s`).
3. The trace is replayed `--runs` times on the live graph, and simulated once with the calibrated overheads.
4. Printed: the simulation's relative error of each figure (median over the live runs), the share of rounds that were
   routed alike, and how far the live runs are from each other, which no simulation can undercut.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, count
from pathlib import Path
from typing import Any

from ampd.cli.serve.devices import worker_environments
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create
from ampd.types import Parallelism, Slo
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from tools.demo import ampd_command, running_graph
from workloads.trace import Round, Session, load_trace, retime, write_trace

_TP1 = Parallelism(1)
_SEEDS = count(1)
_WINDOW_S = 11.0
"""A replay begins with empty windows, as a simulation does."""
_FIGURES = {
    "TTFT mean": ("ttft_s", "mean"),
    "TTFT P95": ("ttft_s", "p95"),
    "TTFT P99": ("ttft_s", "p99"),
    "TTFT initial mean": ("ttft_initial_s", "mean"),
    "TTFT initial P95": ("ttft_initial_s", "p95"),
    "TTFT incremental mean": ("ttft_incremental_s", "mean"),
    "TTFT incremental P95": ("ttft_incremental_s", "p95"),
    "ITL mean": ("itl_s", "mean"),
    "round end to end mean": ("e2e_s", "mean"),
}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="ampd-fidelity-") as name:
        folder = Path(name)
        sessions = scaled(
            retime(load_trace(options.trace), options.rate, options.seed, options.limit), options.time_scale
        )
        longest = max(session.max_context_tokens for session in sessions)
        perf = options.perf or (measured_profile(folder, longest) if options.engine == "sglang" else "tiny-cpu")
        model = load_performance_model(perf)
        trace = folder / "trace.jsonl"
        write_trace(sessions, trace)
        serve = ["--engine", options.engine, "--port", "0", "--perf", str(perf), "--routing", options.routing]
        serve += ["--prefill", str(options.prefill), "--decode", str(options.decode), "--pools", "static"]
        serve += ["--ordering", "ampd", "--slicing", "whole", "--ttft", str(options.ttft), "--itl", str(options.itl)]
        with running_graph(serve, _say) as url:
            _replay(url, _write(calibration_sessions(4), folder), folder, options)  # warms everything up
            calibrated = _replay(url, _write(calibration_sessions(12), folder), folder, options)
            overheads = lone_overheads(calibrated["records"], model, options.engine == "sglang")
            _say(f"calibrated: {overheads}")
            live = [_replay(url, trace, folder, options) for _ in range(options.runs)]
    simulated, routes = _simulate(sessions, model, overheads, options)
    result = _compare(live, simulated, routes) | {"overheads": overheads, "performance_model": model.name}
    result |= {key: getattr(options, key) for key in ("engine", "trace", "routing", "rate", "time_scale", "runs")}
    print(json.dumps(result, indent=1) if options.json else _table(result))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("sglang", "modelled"), default="sglang")
    parser.add_argument("--perf", help="performance model of the engines; default: measured now")
    parser.add_argument("--trace", default="tau-bench-airline")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--rate", type=float, default=None, help="Poisson arrivals; default: the trace's own")
    parser.add_argument("--time-scale", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--routing", default="ampd")
    parser.add_argument("--ttft", type=float, default=0.8)
    parser.add_argument("--itl", type=float, default=0.2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one object")
    return parser.parse_args()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- live


def measured_profile(folder: Path, max_tokens: int) -> str:
    """Measure the engines under the threads that a worker of the graph gets."""
    file = folder / "measured.json"
    env = os.environ | worker_environments([1, 1], [], os.cpu_count() or 1)[0]
    argv = [*ampd_command("profile"), "--engine", "sglang", "--model", "tiny", "--output", str(file)]
    # Kept, so that a fit can be looked at after the run.
    points = Path(tempfile.mkdtemp(prefix="ampd-fidelity-points-")) / "points.json"
    print(f"measured points: {points}", file=sys.stderr)
    argv += ["--max-tokens", str(max_tokens), "--points", str(points)]
    subprocess.run(argv, check=True, env=env, stdout=sys.stderr)
    return str(file)


def calibration_sessions(sessions: int, spacing_s: float = 4.0) -> list[Session]:
    """Sessions that never meet, of rounds like those of real agents."""
    rounds = (Round(incr_tokens=1200, output_tokens=24), Round(incr_tokens=80, output_tokens=24, tool_s=0.3))
    return [Session(session_id=f"c{index}", arrival_s=spacing_s * index, rounds=rounds) for index in range(sessions)]


def _write(sessions: Sequence[Session], folder: Path) -> Path:
    write_trace(sessions, folder / "calibration.jsonl")
    return folder / "calibration.jsonl"


def _replay(url: str, trace: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    file = folder / "replay.json"
    time.sleep(_WINDOW_S)
    argv = [*ampd_command("replay"), str(trace), "--url", url, "--json", str(file)]
    # Other words each time: a prefix that an engine knows from the run before costs nothing.
    argv += ["--ttft", str(options.ttft), "--itl", str(options.itl), "--seed", str(next(_SEEDS))]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def lone_overheads(
    records: Sequence[dict[str, Any]], model: PiecewiseModel, with_pass: bool, theta: Parallelism = _TP1
) -> dict[str, float]:
    """What is left of lone rounds' times when the model's part is taken away."""
    first = [record for record in records if record["round"] == 0]
    remote = [record for record in first if record["decision"]["route"] == "remote"]
    read = [record["decision"] for record in remote if record["decision"]["kv_read_tokens_increment"]]
    overheads = {
        "dispatch_s": [record["ttft_s"] - model.prefill_s(0, record["incr_tokens"], theta) for record in first],
        "kv_read_s": [
            each["kv_read_s_increment"] - model.kv_transfer_s(each["kv_read_tokens_increment"], theta, theta)
            for each in read
        ],
        "hand_over_s": [_hand_over_s(record, model, with_pass, theta) for record in remote],
    }
    return {name: max(statistics.median(values or [0.0]), 0.0) for name, values in overheads.items()}


def _hand_over_s(record: dict[str, Any], model: PiecewiseModel, with_pass: bool, theta: Parallelism) -> float:
    """From the first token to the second, less the read of the KV and the pass or step that makes the second."""
    prompt, tokens = record["incr_tokens"], record["output_tokens"]
    modelled_s = record["decision"]["kv_read_s_increment"]
    modelled_s += _tail_s(prompt, model, theta) if with_pass else model.decode_step_s(1, prompt + 1, theta)
    modelled_s += sum(model.decode_step_s(1, prompt + step, theta) for step in range(2, tokens))
    return float(record["e2e_s"] - record["ttft_s"] - modelled_s)


def _tail_s(prompt: int, model: PiecewiseModel, theta: Parallelism) -> float:
    return model.prefill_s(prompt // 16 * 16, prompt % 16 + 1, theta)


# -- simulated


def scaled(sessions: Sequence[Session], time_scale: float) -> list[Session]:
    return [
        session.model_copy(
            update={
                "arrival_s": session.arrival_s * time_scale,
                "rounds": tuple(
                    record.model_copy(update={"tool_s": record.tool_s * time_scale}) for record in session.rounds
                ),
            }
        )
        for session in sessions
    ]


def _simulate(
    sessions: Sequence[Session], model: PiecewiseModel, overheads: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[tuple[str, int], str | None]]:
    capacity = model.kv_capacity_tokens(_TP1) or 0
    cluster = Cluster(
        prefill=(ReplicaGroup(options.prefill, _TP1, capacity),), decode=(ReplicaGroup(options.decode, _TP1, capacity),)
    )
    policies = Policies(create("binding", "least-kv"), create("routing", options.routing), create("ordering", "ampd"))
    slo = Slo(options.ttft, options.itl)
    # The modelled engine joins a round that was prefilled elsewhere to the next step, SGLang gives it a pass.
    settings = SimulationOptions(seed=options.seed, hand_over_pass=options.engine == "sglang", **overheads)
    run = simulate(sessions, cluster, model, policies, slo, settings)
    return run.result(slo), {(record.session_id, record.index): record.route for record in run.rounds}


# -- comparison


def _compare(
    live: Sequence[dict[str, Any]], simulated: dict[str, Any], routes: dict[tuple[str, int], str | None]
) -> dict[str, Any]:
    errors = {}
    for label, (key, part) in _FIGURES.items():
        values = [run[key][part] for run in live]
        ours = simulated[key][part]
        errors[label] = {
            "live_median": statistics.median(values),
            "simulated": ours,
            "error": statistics.median((ours - value) / value for value in values),
            "live_spread": _spread(values, lambda value, other: abs(value - other) / other),
        }
    live_routes = [routes_of(run) for run in live]
    return {
        "figures": errors,
        "decisions_equal": statistics.median(equal_share(routes, route) for route in live_routes),
        "decisions_equal_among_live_runs": _spread(live_routes, equal_share),
        "local_share_live": statistics.median(_local_share(route) for route in live_routes),
        "local_share_simulated": _local_share(routes),
        "attainment_live": statistics.median(run["attainment"]["rounds"] for run in live),
        "attainment_simulated": simulated["attainment"]["rounds"],
        "rounds": len(routes),
        "live_errors": sum(run["errors"] for run in live),
    }


def _spread(items: Sequence[Any], measure: Callable[[Any, Any], float]) -> float | None:
    """The median over all pairs of runs."""
    pairs = [measure(first, second) for first, second in combinations(items, 2)]
    return statistics.median(pairs) if pairs else None


Routes = dict[tuple[str, int], str | None]
"""(session id, round) -> the route that was decided."""


def routes_of(run: Mapping[str, Any]) -> Routes:
    """The routes of a live run."""
    return {(each["session_id"], each["round"]): each["decision"].get("route") for each in run["records"]}


def equal_share(routes: Routes, other: Routes) -> float:
    """The share of the rounds with equal routes."""
    return sum(other.get(key) == route for key, route in routes.items()) / len(routes)


def _local_share(routes: Routes) -> float:
    return sum(route == "local" for route in routes.values()) / len(routes)


def _table(result: dict[str, Any]) -> str:
    lines = [f"{'':<24}{'live (median)':>15}{'simulated':>12}{'error':>9}{'live vs live':>14}"]
    for label, row in result["figures"].items():
        spread = "-" if row["live_spread"] is None else f"{row['live_spread']:.1%}"
        live, ours = f"{row['live_median'] * 1e3:.1f} ms", f"{row['simulated'] * 1e3:.1f} ms"
        lines.append(f"{label:<24}{live:>15}{ours:>12}{row['error']:>+9.1%}{spread:>14}")
    among = result["decisions_equal_among_live_runs"]
    lines += [
        "",
        f"routed alike            {result['decisions_equal']:.1%} of {result['rounds']} rounds"
        + (f" (live runs among themselves {among:.1%})" if among is not None else ""),
        *(
            f"{label:<24}{result[f'{key}_live']:.1%} live, {result[f'{key}_simulated']:.1%} simulated"
            for label, key in (("routed locally", "local_share"), ("attainment of rounds", "attainment"))
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
