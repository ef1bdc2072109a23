"""Simulated rounds per second against `dynamo.replay` (offline) on the same multi-turn trace, disaggregated.

    python benchmarks/simulation_speed.py [--workload NAME] [--sessions 600] [--repeats 5] [--json] [--overload]

Workloads: every trace of the project. The shipped real ones are repeated (`tau-bench-airline`, `coding-agents`,
`toolbench-answers`), the others are generated (`toolbench`, `gaia`, `hotpotqa`, `dureader`).

The same sessions go to both: ours with the policies `ampd`, theirs with each of its routers, on as many workers of each
kind. After `make compiled`, ours runs compiled and in pure Python. Runs alternate; medians of the wall time that each
spends on simulating (theirs as it reports it, ours around `simulate`), and of whole processes. Both finish every round;
what they model differs (see benchmarks/README.md).

`--overload` runs ours alone, with the default policies: the CPU time per round at the load that the workers can just
carry, and at three times that load, where queues are long. Runs alternate in one process. It is compiled with
`AMPD_COMPILED=1` in the environment.
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
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ampd import compiled
from ampd.perf.piecewise import load_performance_model
from ampd.policies import defaults
from ampd.policies.registry import create
from ampd.types import Parallelism, Slo
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies
from planner.simulator.simulate import simulate
from workloads.generate import Lengths, generate
from workloads.retime import retime
from workloads.trace import Session, load_trace, shipped_traces, write_trace

_BLOCK = 512
_WORKERS = 4
_RATES = {
    "tau-bench-airline": 4.0,
    "coding-agents": 0.15,
    "toolbench-answers": 2.0,
    "toolbench": 8.0,
    "gaia": 1.2,
    "hotpotqa": 5.0,
    "dureader": 2.0,
}
"""Sessions per second at which the queues stay short."""
_CAPACITY_TOKENS = 2_000_000
_ROUTERS = ("round_robin", "kv_router")
_PURE = "ampd, pure Python"


def main() -> int:
    options = _options()
    if options.ours:
        print(json.dumps(_ours(load_trace(options.ours))))
        return 0
    sessions = _sessions(options.workload, options.sessions, options.seed)
    rounds = sum(len(session.rounds) for session in sessions)
    if options.overload:
        result = {"workload": options.workload, "rounds": rounds, "repeats": options.repeats} | _overload(options)
        print(json.dumps(result, indent=1) if options.json else _overload_table(result))
        return 0
    with tempfile.TemporaryDirectory(prefix="ampd-speed-") as name:
        folder = Path(name)
        write_trace(sessions, folder / "ours.jsonl")
        _write_mooncake(sessions, folder / "theirs.jsonl")
        runs: dict[str, list[dict[str, float]]] = {"ampd": [], _PURE: [], **{router: [] for router in _ROUTERS}}
        argv = [sys.executable, __file__, "--ours", str(folder / "ours.jsonl")]
        for _ in range(options.repeats):
            runs["ampd"].append(_timed(argv, None))
            if runs["ampd"][-1]["is_compiled"]:
                runs[_PURE].append(_timed(argv, None, "0"))
            for router in _ROUTERS:
                runs[router].append(_theirs(folder, router))
    result = {"workload": options.workload, "rounds": rounds, "repeats": options.repeats} | _summary(runs, rounds)
    print(json.dumps(result, indent=1) if options.json else _table(result))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(_RATES), default="tau-bench-airline")
    parser.add_argument("--sessions", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--overload", action="store_true", help="ours alone, at the full load and at three times it")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    return parser.parse_args()


def _sessions(workload: str, count: int, seed: int, rate: float | None = None) -> list[Session]:
    rate = rate or _RATES[workload]
    if workload in shipped_traces():
        return retime(load_trace(workload), rate, seed, count)
    return list(generate(workload, count, rate, seed, Lengths.PER_SESSION))


def _ours(sessions: Sequence[Session], policies: Policies | None = None) -> dict[str, float]:
    group = ReplicaGroup(_WORKERS, Parallelism(4), _CAPACITY_TOKENS)
    if policies is None:
        policies = Policies(create("binding", "least-kv"), create("routing", "ampd"), create("ordering", "ampd"))
    model = load_performance_model("qwen3-32b-h20")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run = simulate(sessions, Cluster((group,), (group,)), model, policies, Slo(0.35, 0.04))
    return {
        "seconds": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "rounds": len(run.rounds),
        "virtual_s": run.duration_s,
        "is_compiled": compiled.state() == "compiled",
    }


# -- overload


def _overload(options: argparse.Namespace) -> dict[str, Any]:
    """Median CPU time per round by load, where load 1 is what the workers finish per second when all sessions wait."""
    policies = Policies(
        create("binding", defaults.BINDING),
        create("routing", defaults.ROUTING),
        create("ordering", defaults.ORDERING),
        create("slicing", defaults.SLICING),
    )
    at_once = _ours(_sessions(options.workload, options.sessions, options.seed, 1e6), policies)
    carried = options.sessions / at_once["virtual_s"]
    loads = {load: _sessions(options.workload, options.sessions, options.seed, load * carried) for load in (1, 3)}
    runs: dict[int, list[dict[str, float]]] = {load: [] for load in loads}
    for _ in range(options.repeats):
        for load, sessions in loads.items():
            runs[load].append(_ours(sessions, policies))
    times_us = {
        load: statistics.median(1e6 * each["cpu_s"] / each["rounds"] for each in done) for load, done in runs.items()
    }
    return {
        "carried_sessions_per_s": carried,
        "us_per_round": times_us,
        "ratio_of_overload": times_us[3] / times_us[1],
    }


def _overload_table(result: dict[str, Any]) -> str:
    lines = [f"{result['workload']}, {result['rounds']} rounds, medians of {result['repeats']}"]
    lines += [f"{load} x the load: {time_us:.0f} us CPU per round" for load, time_us in result["us_per_round"].items()]
    return "\n".join([*lines, f"ratio: {result['ratio_of_overload']:.2f}"])


# -- theirs


def _write_mooncake(sessions: Sequence[Session], path: Path) -> None:
    """Dynamo's multi-turn variant of the Mooncake format: a time stamp for the first turn, delays for the others."""
    lines, fresh = [], count()
    for session in sessions:
        ids: list[int] = []
        context = 0
        for index, ((hist, incr), item) in enumerate(zip(session.prompts_tokens(), session.rounds, strict=True)):
            if hist < context:
                del ids[hist // _BLOCK :]  # a rewritten context has other blocks from there on
            context = hist + incr + item.output_tokens
            blocks = -(-(hist + incr) // _BLOCK)
            ids += [next(fresh) for _ in range(blocks - len(ids))]
            when = {"delay": item.tool_s * 1e3} if index else {"timestamp": session.arrival_s * 1e3}
            row = {
                "session_id": session.session_id,
                "input_length": hist + incr,
                "output_length": item.output_tokens,
                "hash_ids": ids[:blocks],
            }
            lines.append(json.dumps(row | when))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _theirs(folder: Path, router: str) -> dict[str, float]:
    report = folder / "report.json"
    engine = {"block_size": 64, "num_gpu_blocks": _CAPACITY_TOKENS // 64}
    argv = [sys.executable, "-m", "dynamo.replay", str(folder / "theirs.jsonl"), "--trace-format", "mooncake"]
    argv += ["--replay-mode", "offline", "--router-mode", router, "--report-json", str(report)]
    argv += ["--num-prefill-workers", str(_WORKERS), "--num-decode-workers", str(_WORKERS)]
    argv += ["--prefill-engine-args", json.dumps(engine | {"worker_type": "prefill"})]
    argv += ["--decode-engine-args", json.dumps(engine | {"worker_type": "decode"})]
    return _timed(argv, report)


def _timed(argv: Sequence[str], report: Path | None, uses_compiled: str = "1") -> dict[str, float]:
    """Seconds of the whole process and of the simulation in it, and the rounds that it finished."""
    environment = os.environ | {"DYN_LOG": "off", compiled.VARIABLE: uses_compiled}
    start_s = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    process_s = time.perf_counter() - start_s
    if done.returncode:
        raise SystemExit(f"{argv[2]} failed: {done.stderr[-500:]}")
    if report is None:
        return json.loads(done.stdout) | {"process_s": process_s}
    row: dict[str, Any] = json.loads(report.read_text())
    return {
        "seconds": _find(row, "wall_time_ms") / 1e3,
        "rounds": _find(row, "completed_requests"),
        "virtual_s": _find(row, "duration_ms") / 1e3,
        "process_s": process_s,
    }


def _find(row: dict[str, Any], key: str) -> float:
    """A figure of their report, wherever it stands."""
    if key in row:
        return float(row[key])
    for value in row.values():
        if isinstance(value, dict):
            try:
                return _find(value, key)
            except KeyError:
                continue
    raise KeyError(key)


# -- results


def _summary(runs: dict[str, list[dict[str, float]]], rounds: int) -> dict[str, Any]:
    rows = {
        name: {
            "rounds_per_s": rounds / statistics.median(each["seconds"] for each in done),
            "rounds_per_s_process": rounds / statistics.median(each["process_s"] for each in done),
            "rounds_finished": done[0]["rounds"],
            "virtual_s": done[0]["virtual_s"],
        }
        for name, done in runs.items()
        if done
    }
    fastest = max(rows[router]["rounds_per_s"] for router in _ROUTERS)
    return {"systems": rows, "ratio_to_fastest_rival": rows["ampd"]["rounds_per_s"] / fastest}


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['workload']}, {result['rounds']} rounds, medians of {result['repeats']}"]
    for name, row in result["systems"].items():
        label = f"dynamo.replay {name}" if name in _ROUTERS else name
        lines.append(
            f"{label:<28}{row['rounds_per_s']:>9.0f} rounds/s {row['rounds_per_s_process']:>9.0f} as a whole process, "
            f"{row['rounds_finished']:.0f} rounds in {row['virtual_s']:.0f} virtual s"
        )
    return "\n".join([*lines, f"ratio to the fastest rival  {result['ratio_to_fastest_rival']:.2f}"])


if __name__ == "__main__":
    sys.exit(main())
