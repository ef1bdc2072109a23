"""How long `ampd plan` takes, by GPUs, with a cold cache, full-cluster checks included.

    python benchmarks/plan_time.py [--gpus 8 16 32 64 128 256 1024] [--repeats 3] [--json]

ToolBench sessions (generated) for Qwen3-32B on H20 at one session per second and 4 GPUs; whole processes, medians. The
paper's figures (arXiv 2602.14516, its own machine) stand beside them for orientation, not as a race.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ampd.cli.serve.running import ampd_command
from workloads.generate import Lengths, generate
from workloads.trace import write_trace

_GPUS = (8, 16, 32, 64, 128, 256, 1024)
_PAPER_S = {8: 0.54, 16: 1.93, 32: 5.06, 64: 14.50, 128: 28.88, 256: 61.67}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=list(_GPUS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ampd-plan-") as name:
        trace = Path(name) / "toolbench.jsonl"
        write_trace(generate("toolbench", 400, 1.0, 0, Lengths.PER_SESSION), trace)
        for gpus in options.gpus:
            rows.append(_row(trace, gpus, options.repeats))
            if not options.json:
                print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"plans": rows}, indent=1))
    return 0


def _row(trace: Path, gpus: int, repeats: int) -> dict[str, Any]:
    argv = [*ampd_command("plan"), str(trace), "--model", "qwen3-32b", "--gpu", "h20", "--gpus", str(gpus)]
    argv += ["--rate", str(gpus / 4), "--ttft", "0.35", "--itl", "0.04", "--no-use-cache", "--json"]
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        times_s.append(time.perf_counter() - start_s)
    best = json.loads(done.stdout)["layouts"][0]
    return {
        "gpus": gpus,
        "seconds": statistics.median(times_s),
        "paper_s": _PAPER_S.get(gpus),
        "prefill": best["prefill"],
        "decode": best["decode"],
        "attainment": best["simulated"]["attainment"]["rounds"],
    }


def _line(row: dict[str, Any]) -> str:
    groups = ["+".join(f"{each['replicas']}xTP{each['tp']}" for each in row[phase]) for phase in ("prefill", "decode")]
    paper = "-" if row["paper_s"] is None else f"{row['paper_s']:.2f} s"
    return (
        f"{row['gpus']:>5} GPUs {row['seconds']:>7.2f} s (paper {paper:>8})  prefill {groups[0]}, decode {groups[1]}, "
        f"attainment {row['attainment']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
