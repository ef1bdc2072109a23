"""Simulated rounds per second against `dynamo.replay` (offline) on the same multi-turn traces, disaggregated.

    python -m benchmarks.simulation_speed --replay-python PYTHON [--workload NAME ...] [--sessions N] [--json]
    python -m benchmarks.simulation_speed --overload [--workload NAME ...] [--sessions N] [--json]

Workloads: every trace of the project, which is the default. The shipped real ones are repeated (`tau-bench-airline`,
`coding-agents`, `toolbench-answers`), the others are generated (`toolbench`, `gaia`, `hotpotqa`, `dureader`).

The same sessions go to both: ours with the default policies and with those of the paper, theirs with each of its
routers, on as many workers of each kind. After `make compiled`, ours runs compiled, and the default policies in pure
Python too, from a copy of the sources. Runs alternate; medians of the wall time that each spends on simulating (theirs
as it reports it, ours around `simulate`), and of whole processes. Both finish every round; what they model differs (see
benchmarks/README.md).
`--json` has each system's figures. `dynamo.replay` was last in ai-dynamo 1.4, so it needs an environment of its own,
whose Python is `--replay-python`:

    uv venv FOLDER && uv pip install --python FOLDER/bin/python ai-dynamo==1.4.2

`--overload` runs ours alone, with the default policies: the CPU time per round at the load that the workers can just
carry, and at three times that load, where queues are long. Runs alternate in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ampd import compiled
from ampd.perf.presets import load_performance_model
from ampd.policies import defaults
from ampd.policies.registry import create
from ampd.types import Parallelism, Slo
from benchmarks import markdown_table
from benchmarks.circumstances import circumstances, in_words
from planner.simulator.options import Cluster, Policies, ReplicaGroup
from planner.simulator.simulate import simulate
from workloads.trace import Session, load_trace, retime, shipped_traces, write_trace
from workloads.trace_command import Lengths, generate

_ROOT = Path(__file__).parents[1]
_BLOCK = 512
_WORKERS = 4
_CAPACITY_TOKENS = 2_000_000
_ROUTERS = ("round_robin", "kv_router")
DEFAULT, PAPER, PURE = "default policies", "paper's policies", "default policies, pure Python"


@dataclass(frozen=True, slots=True)
class Load:
    """How a workload is run.

    Attributes:
        rate: sessions per second at which the queues stay short.
        sessions: against `dynamo.replay`.
        overload_sessions: with `--overload`.
    """

    rate: float
    sessions: int
    overload_sessions: int = 300


LOADS = {
    "toolbench": Load(8.0, 1500),
    "hotpotqa": Load(5.0, 1500),
    "tau-bench-airline": Load(4.0, 600),
    "dureader": Load(2.0, 1500),
    "gaia": Load(1.2, 600),
    "toolbench-answers": Load(2.0, 1500),
    "coding-agents": Load(0.15, 300, 120),
}


def main() -> int:
    options = _options()
    if options.ours:
        policies = _paper_policies() if options.paper else _default_policies()
        print(json.dumps(_ours(load_trace(options.ours), policies)))
        return 0
    run = _overload if options.overload else _against_theirs
    results, now = [], circumstances()
    if not options.json:
        print(f"medians of {options.repeats}; {in_words(now)}")
        if options.overload:
            print(f"CPU time per round; this process is {compiled.state()}")
        print("\n" + markdown_table.head(_OVERLOAD_COLUMNS if options.overload else _COLUMNS))
    for workload in options.workload or LOADS:
        result = run(options, workload)
        results.append(result)
        if not options.json:
            print(overload_row(result) if options.overload else row(result), flush=True)
    if options.json:
        print(json.dumps({"benchmark": "simulation_speed", **now, "workloads": results}, indent=1))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(LOADS), nargs="+", help="only these; default: all")
    parser.add_argument("--sessions", type=int, help="of each workload; default: as many as its figures have")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--overload", action="store_true", help="ours alone, at the full load and at three times it")
    parser.add_argument("--replay-python", default=sys.executable, help="of an environment with ai-dynamo 1.4.2")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    parser.add_argument("--paper", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _against_theirs(options: argparse.Namespace, workload: str) -> dict[str, Any]:
    count = options.sessions or LOADS[workload].sessions
    sessions = _sessions(workload, count, options.seed)
    with tempfile.TemporaryDirectory(prefix="ampd-speed-") as name:
        folder = Path(name)
        write_trace(sessions, folder / "ours.jsonl")
        _write_mooncake(sessions, folder / "theirs.jsonl")
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in (DEFAULT, PAPER, PURE, *_ROUTERS)}
        argv = [sys.executable, "-m", "benchmarks.simulation_speed", "--ours", str(folder / "ours.jsonl")]
        for _ in range(options.repeats):
            runs[DEFAULT].append(_timed(argv, None))
            runs[PAPER].append(_timed([*argv, "--paper"], None))
            if runs[DEFAULT][-1]["is_compiled"]:
                runs[PURE].append(_timed(argv, None, _copy(folder / "pure")))
            for router in _ROUTERS:
                runs[router].append(_theirs(options.replay_python, folder, router))
    rounds = sum(len(session.rounds) for session in sessions)
    return {"workload": workload, "sessions": count, "rounds": rounds} | summary(runs, rounds)


def _sessions(workload: str, count: int, seed: int, rate: float | None = None) -> list[Session]:
    rate = rate or LOADS[workload].rate
    if workload in shipped_traces():
        return retime(load_trace(workload), rate, seed, count)
    return list(generate(workload, count, rate, seed, Lengths.PER_SESSION))


def _default_policies() -> Policies:
    return Policies(
        create("binding", defaults.BINDING),
        create("routing", defaults.ROUTING),
        create("ordering", defaults.ORDERING),
        create("slicing", defaults.SLICING),
    )


def _paper_policies() -> Policies:
    return Policies(create("binding", "least-kv"), create("routing", "ampd"), create("ordering", "ampd"))


def _ours(sessions: Sequence[Session], policies: Policies) -> dict[str, float]:
    group = ReplicaGroup(_WORKERS, Parallelism(4), _CAPACITY_TOKENS)
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


def _overload(options: argparse.Namespace, workload: str) -> dict[str, Any]:
    """Median CPU time per round by load, where load 1 is what the workers finish per second when all sessions wait."""
    count, policies = options.sessions or LOADS[workload].overload_sessions, _default_policies()
    at_once = _ours(_sessions(workload, count, options.seed, 1e6), policies)
    carried = count / at_once["virtual_s"]
    loads = {load: _sessions(workload, count, options.seed, load * carried) for load in (1, 3)}
    runs: dict[int, list[dict[str, float]]] = {load: [] for load in loads}
    for _ in range(options.repeats):
        for load, sessions in loads.items():
            runs[load].append(_ours(sessions, policies))
    times_us = {
        load: statistics.median(1e6 * each["cpu_s"] / each["rounds"] for each in done) for load, done in runs.items()
    }
    return {
        "workload": workload,
        "sessions": count,
        "carried_sessions_per_s": carried,
        "us_per_round": times_us,
        "ratio_of_overload": times_us[3] / times_us[1],
    }


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


def _theirs(python: str, folder: Path, router: str) -> dict[str, float]:
    report = folder / "report.json"
    engine = {"block_size": 64, "num_gpu_blocks": _CAPACITY_TOKENS // 64}
    argv = [python, "-m", "dynamo.replay", str(folder / "theirs.jsonl"), "--trace-format", "mooncake"]
    argv += ["--replay-mode", "offline", "--router-mode", router, "--report-json", str(report)]
    argv += ["--num-prefill-workers", str(_WORKERS), "--num-decode-workers", str(_WORKERS)]
    argv += ["--prefill-engine-args", json.dumps(engine | {"worker_type": "prefill"})]
    argv += ["--decode-engine-args", json.dumps(engine | {"worker_type": "decode"})]
    return _timed(argv, report)


def _copy(root: Path) -> Path:
    """A copy of the sources without the build beside them, made once."""
    for package in ("ampd", "benchmarks", "planner", "workloads"):
        if not (root / package).exists():
            shutil.copytree(_ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def _timed(argv: Sequence[str], report: Path | None, root: Path = _ROOT) -> dict[str, float]:
    """Seconds of the whole process and of the simulation in it, and the rounds that it finished. `root`: of ours."""
    environment = os.environ | {"DYN_LOG": "off", "PYTHONPATH": str(root)}
    start_s = time.perf_counter()
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, env=environment, check=False)
    process_s = time.perf_counter() - start_s
    if done.returncode:
        raise SystemExit(f"{argv[2]} failed: {done.stderr[-500:]}")
    if report is None:
        ours: dict[str, float] = json.loads(done.stdout)
        return ours | {"process_s": process_s}
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


def summary(runs: dict[str, list[dict[str, float]]], rounds: int) -> dict[str, Any]:
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
    ratios = {
        name: {
            key: rows[name][key] / max(rows[router][key] for router in _ROUTERS)
            for key in ("rounds_per_s", "rounds_per_s_process")
        }
        for name in (DEFAULT, PAPER)
    }
    return {"systems": rows, "ratios_to_faster_router": ratios}


_COLUMNS = (
    "workload",
    "sessions",
    f"ours, rounds/s: {DEFAULT}",
    PAPER,
    PURE,
    "`dynamo.replay`, faster router",
    f"ratio: {DEFAULT}",
    PAPER,
    f"ratio of whole processes: {DEFAULT}",
)
_OVERLOAD_COLUMNS = ("workload", "sessions", "1 x", "3 x", "ratio")


def row(result: dict[str, Any]) -> str:
    systems, ratios = result["systems"], result["ratios_to_faster_router"]
    ours = [systems[name]["rounds_per_s"] if name in systems else None for name in (DEFAULT, PAPER, PURE)]
    theirs = max(systems[router]["rounds_per_s"] for router in _ROUTERS)
    speeds = ["-" if each is None else f"{each:,.0f}" for each in (*ours, theirs)]
    compared = [ratios[DEFAULT]["rounds_per_s"], ratios[PAPER]["rounds_per_s"]]
    compared.append(ratios[DEFAULT]["rounds_per_s_process"])
    cells = (f"`{result['workload']}`", f"{result['sessions']:,}", *speeds, *(f"{each:.2f}" for each in compared))
    return markdown_table.row(cells)


def overload_row(result: dict[str, Any]) -> str:
    times = [f"{time_us:.0f} us" for time_us in result["us_per_round"].values()]
    return markdown_table.row(
        (f"`{result['workload']}`", result["sessions"], *times, f"{result['ratio_of_overload']:.2f}")
    )


if __name__ == "__main__":
    sys.exit(main())
