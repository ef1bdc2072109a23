"""Shows whether a change altered a simulated decision, by digests of simulations and plans.

    python -m benchmarks.recorded_results --write before.json     # on the old code
    python -m benchmarks.recorded_results --check before.json     # on the new code: exit code 1 where a digest differs

A digest covers what the command prints with `--json` and, for simulations, the whole timeline: every prefill, slice,
decode step and KV transfer with its time. Only wall times are left out. The cases name every policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_QWEN_H20 = "--model qwen3-32b --gpu h20"
_SPLIT = f"{_QWEN_H20} --prefill 2xTP2 --decode 2xTP2"
_TAU = "tau-bench-airline"
_CODING = "coding-agents"
_TOOLS = "toolbench-answers"

SIMULATIONS = {
    "default": f"{_TAU} {_SPLIT} --rate 3 --limit 200 --ttft 0.5 --itl 0.04 --seed 1",
    "overload": f"{_TAU} {_SPLIT} --rate 12 --limit 250 --ttft 0.5 --itl 0.04 --seed 2",
    "coding-agents": f"{_CODING} {_SPLIT} --rate 0.3 --limit 40 --ttft 2 --itl 0.05 --seed 3",
    "coding-agents overload": f"{_CODING} --model qwen3-32b --gpu h100 --prefill 1xTP2 --decode 1xTP2 --rate 0.6"
    " --limit 40 --ttft 2 --itl 0.04 --seed 4",
    "toolbench": f"{_TOOLS} --perf qwen3-32b-h20 --prefill 1xTP4 --decode 1xTP4 --rate 8 --limit 300 --ttft 0.35"
    " --itl 0.04 --seed 5",
    "modes": f"{_TAU} {_SPLIT} --rate 4 --limit 150 --ttft 0.5 --itl 0.04 --seed 6"
    " --mode disaggregated,always-remote,colocated",
    "continuum": f"{_TAU} {_SPLIT} --rate 4 --limit 150 --ttft 0.5 --itl 0.04 --seed 6"
    " --mode colocated --ordering continuum",
    "paper": f"{_TAU} {_SPLIT} --rate 5 --limit 150 --ttft 0.5 --itl 0.04 --seed 7"
    " --routing ampd,ampd(alpha=0.7,beta=0.5) --ordering ampd,ampd(window=8),fcfs --slicing whole",
    "delayed views": f"{_TAU} {_SPLIT} --rate 5 --limit 200 --ttft 0.5 --itl 0.04 --seed 8 --state-delay-s 0.05"
    " --coordinators 3 --dispatch-s 0.003 --hand-over-s 0.002 --kv-read-s 0.004 --routing predictive,ampd",
    "no hand-over pass": f"{_CODING} {_SPLIT} --rate 0.3 --limit 30 --ttft 2 --itl 0.05 --seed 9 --no-hand-over-pass",
    "elastic pools": f"{_TAU} {_SPLIT} --rate 8 --limit 200 --ttft 0.5 --itl 0.04 --seed 10"
    " --pools predictive,arrow,static --binding predictive",
    "little memory": f"{_TAU} {_SPLIT} --rate 4 --limit 150 --ttft 0.5 --itl 0.04 --seed 11 --kv-capacity-tokens 60000",
    "KV store": f"{_TAU} {_SPLIT} --rate 3 --limit 150 --ttft 0.5 --itl 0.04 --seed 18 --kv-capacity-tokens 15000"
    " --kv-store-gib-per-gpu 1",
    "moves": f"{_TAU} {_SPLIT} --rate 6 --limit 150 --ttft 0.5 --itl 0.04 --seed 19 --moves any --pools predictive"
    " --coordinators 2 --state-delay-s 0.02 --kv-capacity-tokens 60000 --max-wait 4",
    "rivals' routing": f"{_TAU} {_SPLIT} --rate 6 --limit 120 --ttft 0.5 --itl 0.04 --seed 12 --routing"
    " always-local,always-remote,arrow,deflection,first-remote,laps,table,threshold,threshold(tokens=512)",
    "rivals' ordering": f"{_TAU} {_SPLIT} --rate 9 --limit 120 --ttft 0.5 --itl 0.04 --seed 13"
    " --slicing slack,itl-chunks --ordering continuum,edf,hrrn,jct,laps,shortest-prefill-first,on-time",
    "kairos": f"{_TAU} {_SPLIT} --rate 9 --limit 120 --ttft 0.5 --itl 0.04 --seed 17 --ordering kairos"
    " --routing always-remote",
    "laps": f"{_TAU} {_QWEN_H20} --prefill 4xTP1 --decode 2xTP2 --rate 6 --limit 150 --ttft 0.5 --itl 0.04 --seed 14"
    " --routing laps --ordering laps --pools laps --binding least-kv",
    "arrow": f"{_CODING} {_QWEN_H20} --prefill 2xTP2 --decode 2xTP2 --rate 0.3 --limit 30 --ttft 2 --itl 0.05"
    " --seed 15 --routing arrow --ordering fcfs --pools arrow --binding arrow",
    "kv-router": f"{_TAU} {_SPLIT} --rate 6 --limit 120 --ttft 0.5 --itl 0.04 --seed 20 --binding kv-router",
    "co-located mixed passes": f"{_TAU} {_SPLIT} --rate 6 --limit 120 --ttft 0.5 --itl 0.03 --seed 22 --mode colocated"
    " --ordering fcfs --slicing dynaserve",
    "taichi": f"{_TAU} {_QWEN_H20} --mixed 2xTP2 --decode 2xTP2 --rate 6 --limit 150 --ttft 0.5 --itl 0.04 --seed 16"
    " --routing taichi --ordering fcfs --slicing taichi --binding taichi",
}
PLANS = {
    "plan tau 8": f"{_TAU} {_QWEN_H20} --gpus 8 --rate 3 --ttft 0.5 --itl 0.04 --limit 200",
    "plan coding 16": f"{_CODING} --model qwen3-32b --gpu h200 --gpus 16 --rate 0.2 --ttft 2 --itl 0.05 --limit 40",
    "plan toolbench 4": f"{_TOOLS} --model llama-3.1-8b --gpu l40s --gpus 4 --rate 4 --ttft 0.5 --itl 0.05 --limit 150",
    "plan elastic 8": f"{_TAU} --model mixtral-8x7b --gpu h200 --gpus 8 --rate 6 --ttft 0.3 --itl 0.03 --limit 150"
    " --seed 3 --routing ampd --ordering ampd",
}
_WALL_TIMES = {"seconds", "wall_s", "search_seconds", "check_seconds"}


def main() -> int:
    """Write or check the digests."""
    parser = argparse.ArgumentParser(prog="benchmarks.recorded_results", description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    cases = {name: words for name, words in (SIMULATIONS | PLANS).items() if given.only in name}
    with ThreadPoolExecutor(given.jobs) as pool:
        digests = dict(zip(cases, pool.map(_digest, cases), strict=True))
    if given.write:
        given.write.write_text(json.dumps(digests, indent=1) + "\n")
    recorded = json.loads(given.check.read_text()) if given.check else digests
    wrong = [name for name in cases if recorded.get(name) != digests[name]]
    for name in cases:
        print(f"{'DIFFERS' if name in wrong else 'same':8} {digests[name][:16]}  {name}")
    return 1 if wrong else 0


def _digest(name: str) -> str:
    if name in PLANS:
        words = ["ampd", "plan", *PLANS[name].split(), "--jobs", "1", "--budget-s", "0", "--json"]
    else:
        words = ["benchmarks.detailed_simulation", *SIMULATIONS[name].split(), "--jobs", "1"]
    return hashlib.sha256(_output(words)).hexdigest()


def _output(words: list[str]) -> bytes:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.decode()[-500:]}")
    return json.dumps(_without_wall_times(json.loads(done.stdout)), sort_keys=True).encode()


def _without_wall_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_wall_times(item) for key, item in value.items() if key not in _WALL_TIMES}
    return [_without_wall_times(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
