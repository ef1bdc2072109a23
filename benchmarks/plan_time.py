"""How long `ampd plan` takes to its first answer and to its end, by GPUs.

    python benchmarks/plan_time.py [--gpus 8 16 32 64 128 256 1024] [--repeats 3] [--budget-s 60] [--json]

ToolBench sessions (generated) for Qwen3-32B on H20 at one session per second and 4 GPUs; whole processes, medians. A
plan that the budget ended takes that long. The first answer is the layout of the integer programme, before any
simulation. Its time is that of the search, without the start of the process. The paper's figures (arXiv 2602.14516, its
own machine) stand beside them for orientation, not as a race.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ampd.cli.serve.running import ampd_command
from planner.layout.layout import layout_label
from workloads.generate import Lengths, generate
from workloads.trace import write_trace

_GPUS = (8, 16, 32, 64, 128, 256, 1024)
_FIRST = re.compile(r"^best after ([0-9.]+) s: ", re.MULTILINE)
_PAPER_S = {8: 0.54, 16: 1.93, 32: 5.06, 64: 14.50, 128: 28.88, 256: 61.67}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=list(_GPUS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ampd-plan-") as name:
        trace = Path(name) / "toolbench.jsonl"
        write_trace(generate("toolbench", 400, 1.0, 0, Lengths.PER_SESSION), trace)
        for gpus in options.gpus:
            rows.append(_row(trace, gpus, options.repeats, options.budget_s))
            if not options.json:
                print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"plans": rows}, indent=1))
    return 0


def _row(trace: Path, gpus: int, repeats: int, budget_s: float) -> dict[str, Any]:
    argv = [*ampd_command("plan"), str(trace), "--model", "qwen3-32b", "--gpu", "h20", "--gpus", str(gpus)]
    argv += ["--rate", str(gpus / 4), "--ttft", "0.35", "--itl", "0.04", "--budget-s", str(budget_s), "--json"]
    times_s, firsts_s = [], []
    for _ in range(repeats):
        start_s = time.perf_counter()
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        times_s.append(time.perf_counter() - start_s)
        firsts_s.append(float(_FIRST.findall(done.stderr)[0]))
    plan = json.loads(done.stdout)
    best = plan["layouts"][0]
    return {
        "gpus": gpus,
        "first_s": statistics.median(firsts_s),
        "seconds": statistics.median(times_s),
        "stopped": plan["stopped"],
        "paper_s": _PAPER_S.get(gpus),
        "layout": layout_label(best),
        "used_gpus": best["gpus"],
        "attainment": best["attainment"]["mean"],
    }


def _line(row: dict[str, Any]) -> str:
    paper = "-" if row["paper_s"] is None else f"{row['paper_s']:.2f} s"
    return (
        f"{row['gpus']:>5} GPUs: first {row['first_s']:.1f} s, end {row['seconds']:.1f} s"
        f"{' (budget)' if row['stopped'] else ''}, paper {paper}; {row['layout']} on {row['used_gpus']} GPUs, "
        f"attainment {row['attainment']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
