"""A worker that is lost under load, with each way to choose roles: what rounds attain before, soon after and later.

    python -m benchmarks.lost_worker [--lose decode] [--after 40] [--runs 2] [--pools static,predictive] [--json]

Each run starts a graph of modelled engines and replays the same sessions. After a while one worker of the role is
killed and does not come back. `soon` are the rounds that are sent within 15 s of the loss, `later` those after that.
Rounds that fail count as missed. The kinds of roles take turns. A graph may end with its last worker of a role.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from ampd.cli.serve.graph import TARGETS_FILE
from ampd.perf.presets import analytic_model, load_performance_model
from ampd.perf.profile import write_profile
from ampd.telemetry.metrics import names
from ampd.types import Parallelism, Slo
from benchmarks import markdown_table
from benchmarks.fidelity import scaled
from benchmarks.live_policies import slowed
from benchmarks.metrics_agreement import scrape
from tools.demo import ampd_command, running_graph
from workloads.trace import load_trace, retime, write_trace

SOON_S = 15.0
SPANS = ("before", "soon", "later")
_POOLS = ("static", "predictive")


@dataclass(frozen=True)
class Options:
    """What is run. `slow_down`: factor on the engines' times, so that a small machine keeps up."""

    lose: str
    after_s: float
    runs: int
    rate: float
    sessions: int
    prefill: int
    decode: int
    slow_down: float
    slo: Slo


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; prints a Markdown table, or with `--json` one object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lost_worker", description=__doc__.splitlines()[0])
    parser.add_argument("--lose", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--after", type=float, default=40.0, help="seconds from the start of the replay to the loss")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1.2, help="Poisson sessions per second")
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--workers", default="2+2", help="prefill + decode workers at the start")
    parser.add_argument("--pools", default="static,predictive", help=f"ways to choose roles, of {', '.join(_POOLS)}")
    parser.add_argument("--json", action="store_true", help="print one object")
    given = parser.parse_args(argv)
    prefill, decode = map(int, given.workers.split("+"))
    pools_in_turn = given.pools.split(",")
    if unknown := {*pools_in_turn} - {*_POOLS}:
        parser.error(f"--pools: {', '.join(sorted(unknown))} is not one of {', '.join(_POOLS)}")
    options = Options(
        given.lose, given.after, given.runs, given.rate, given.sessions, prefill, decode, 2.0, Slo(2.0, 0.08)
    )
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="ampd-lost-worker-") as name:
        for number in range(options.runs):
            for pools in pools_in_turn if number % 2 == 0 else pools_in_turn[::-1]:
                runs[pools].append(one_run(Path(name), pools, options))
                _say(f"{pools}: {runs[pools][-1]}")
    print(json.dumps(runs, indent=1) if given.json else table(runs))
    return 0


def one_run(folder: Path, pools: str, options: Options) -> dict[str, Any]:
    """Start a graph, replay, lose a worker: the shares attained by span, the rounds that failed, changes of roles."""
    file = folder / "model.json"
    write_profile(analytic_model("qwen3-32b", "h20").profile, file)
    perf = slowed(folder, str(file), options.slow_down)
    capacity = load_performance_model(perf).kv_capacity_tokens(Parallelism(1)) or 0
    sessions = scaled(retime(load_trace("tau-bench-airline"), options.rate, 0, options.sessions), options.slow_down)
    write_trace(sessions, folder / "trace.jsonl")
    logs = Path(tempfile.mkdtemp(dir=folder))
    targets = ["--ttft", str(options.slo.ttft_s), "--itl", str(options.slo.itl_s)]
    flags = ["--engine", "modelled", "--port", "0", "--perf", perf, "--prefill", str(options.prefill)]
    flags += ["--decode", str(options.decode), "--pools", pools, "--max-wait", "0", "--log-dir", str(logs), *targets]
    flags += ["--worker-args", f"--kv-capacity-tokens {capacity}"]
    with running_graph(flags, _say) as url:
        result = folder / "replay.json"
        argv = [*ampd_command("replay"), str(folder / "trace.jsonl"), "--url", url, "--json", str(result), *targets]
        replay = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        time.sleep(options.after_s)
        lost = worker_pid(options.lose)
        changes = role_changes(logs)
        os.kill(lost, signal.SIGKILL)
        replay.wait()
        done = json.loads(result.read_text(encoding="utf-8"))
        return {
            **shares(done["records"], options.after_s, options.slo),
            "failed": done["errors"],
            "changes_before": changes,
            "changes_after": _changes_since(changes, logs),
        }


def _changes_since(changes: float, logs: Path) -> float | None:
    """None: the graph has ended."""
    try:
        return role_changes(logs) - changes
    except httpx.TransportError:
        return None


def worker_pid(role: str) -> int:
    """The last worker of this process' graph that started in the role."""
    found: list[int] = [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if {"workers", "--role", role} <= set(child.cmdline())
    ]
    return max(found)


def role_changes(logs: Path) -> float:
    """Roles that coordinators have assigned. Only coordinators are asked, because a worker may be gone."""
    targets = json.loads((logs / TARGETS_FILE).read_text(encoding="utf-8"))
    asked = [target for target in targets if target["labels"]["process"].startswith("coordinator")]
    folder = logs / "asked"
    folder.mkdir(exist_ok=True)
    (folder / TARGETS_FILE).write_text(json.dumps(asked), encoding="utf-8")
    return scrape(folder).total(names.ROLE_ASSIGNMENTS)


def shares(records: Sequence[Mapping[str, Any]], lost_s: float, slo: Slo) -> dict[str, float | None]:
    """Share of the rounds on target by when they were sent; None: there were none."""
    met: dict[str, list[bool]] = {span: [] for span in SPANS}
    for record in records:
        ttft_s, itl_s = record["ttft_s"], record["itl_s"]
        is_met = record["error"] is None and ttft_s is not None and ttft_s <= slo.ttft_s and (itl_s or 0) <= slo.itl_s
        since_s = record["sent_s"] - lost_s
        met["before" if since_s < 0 else "soon" if since_s < SOON_S else "later"].append(is_met)
    return {span: statistics.fmean(each) if each else None for span, each in met.items()}


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Medians of the runs, and each run of the last span."""
    rows = []
    for pools, each in runs.items():
        row = [f"`{pools}`"]
        row += [_share(statistics.median(found)) if (found := _values(each, span)) else "-" for span in SPANS]
        row.append(", ".join(map(_share, _values(each, "later"))))
        for key in ("failed", "changes_before", "changes_after"):
            row.append(", ".join("graph ended" if run[key] is None else f"{run[key]:g}" for run in each))
        rows.append(row)
    heads = ["roles", *SPANS, "later, by run", "rounds that failed", "changes before the loss", "changes after it"]
    return markdown_table.table(heads, rows)


def _values(runs: Sequence[Mapping[str, Any]], span: str) -> list[float]:
    return [run[span] for run in runs if run[span] is not None]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
