"""How long `ampd plan` takes to its first answer and to its end, by GPUs and in the AMPD paper's settings.

    python -m benchmarks.plan_time [--gpus 8 16 32 64 128 256 1024] [--repeats 3] [--budget-s 60] [--json]
    python -m benchmarks.plan_time --paper [--times 8] [--use-all]
    python -m benchmarks.plan_time --against ../checkout-of-the-version-before

ToolBench sessions (generated) for Qwen3-32B on H20 at one session per second and 4 GPUs. With `--paper`, its twelve
settings (3 models, 4 traces, H20) instead, with its GPUs and targets, at two sessions per second; `--times` multiplies
GPUs and rates. With `--use-all` the plans are for the most goodput of all GPUs, without a rate. Whole processes,
medians. A plan that the budget ended takes that long. The first answer is the layout of the integer programme, before
any simulation. Its time is that of the search, without the start of the process. The paper's figures
(arXiv 2602.14516, its own machine) stand beside them for orientation, not as a race.

`--against PATH` plans with the sources in another folder too. The two versions take turns, so both see the same load of
the machine, and the ratio of their times says more than either. Each uses the compiled modules that were built
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from benchmarks.policies.settings import PAPER_GPUS, PAPER_SLOS_MS
from planner.layout.layout import layout_label
from tools.demo import ampd_command
from workloads.trace import write_trace
from workloads.trace_command import Lengths, generate

_HERE = Path(__file__).resolve().parents[1]
_GPUS = (8, 16, 32, 64, 128, 256, 1024)
_FIRST = re.compile(r"^best after ([0-9.]+) s: ", re.MULTILINE)
_PAPER_S = {8: 0.54, 16: 1.93, 32: 5.06, 64: 14.50, 128: 28.88, 256: 61.67}


_PAPER_RATE = 2.0
"""Sessions per second, of the rates that the paper varies."""


@dataclass(frozen=True)
class Question:
    """What a plan is asked for. Times in milliseconds, the rate in sessions per second."""

    model: str
    trace: str
    gpus: int
    rate: float
    ttft_ms: float
    itl_ms: float
    uses_all: bool = False

    def __str__(self) -> str:
        asked = "the most" if self.uses_all else f"{self.rate:g}/s"
        return f"{self.model} {self.trace}, {asked} on {self.gpus} GPUs"

    @property
    def wanted(self) -> list[str]:
        return ["--use-all"] if self.uses_all else ["--rate", str(self.rate)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=list(_GPUS))
    parser.add_argument("--paper", action="store_true", help="the paper's twelve settings instead")
    parser.add_argument("--times", type=int, default=1, help="multiplies the GPUs and rates of --paper")
    parser.add_argument("--use-all", action="store_true", help="the most goodput of all GPUs, without a rate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-s", type=float, help="of `ampd plan`, which has one of its own")
    parser.add_argument("--against", type=Path, help="folder with the sources of another version, to compare with")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    if options.against is not None and not (options.against / "planner").is_dir():
        parser.error(f"--against: {options.against} has no folder `planner`; give the root of a checkout")
    questions = list(_paper_questions(options.times)) if options.paper else [_question(gpus) for gpus in options.gpus]
    questions = [replace(question, uses_all=options.use_all) for question in questions]
    rows = []
    with tempfile.TemporaryDirectory(prefix="ampd-plan-") as folder:
        for question in questions:
            trace = Path(folder) / f"{question.trace}.jsonl"
            write_trace(generate(question.trace, 400, 1.0, 0, Lengths.PER_SESSION), trace)
            rows.append(_row(question, trace, options))
            if not options.json:
                print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"plans": rows}, indent=1))
    return 0


def _question(gpus: int) -> Question:
    return Question("qwen3-32b", "toolbench", gpus, gpus / 4, 350, 40)


def _paper_questions(times: int) -> Iterator[Question]:
    for model, targets in PAPER_SLOS_MS.items():
        for trace, (ttft_ms, itl_ms) in targets.items():
            yield Question(model, trace, times * PAPER_GPUS[trace], times * _PAPER_RATE, ttft_ms, itl_ms)


@dataclass(frozen=True)
class Planned:
    """One run of `ampd plan`."""

    seconds: float
    first_s: float
    plan: dict[str, Any]


def _row(question: Question, trace: Path, options: argparse.Namespace) -> dict[str, Any]:
    argv = [str(trace), "--model", question.model, "--gpu", "h20", "--gpus", str(question.gpus), *question.wanted]
    argv += ["--ttft", str(question.ttft_ms / 1e3), "--itl", str(question.itl_ms / 1e3)]
    argv += ["--json"] if options.budget_s is None else ["--json", "--budget-s", str(options.budget_s)]
    ours, others = [], []
    for _ in range(options.repeats):
        if options.against is not None:
            others.append(_planned(argv, options.against))
        ours.append(_planned(argv, _HERE))
    row = {"question": str(question), "gpus": question.gpus, **_figures(ours)}
    row["paper_s"] = _PAPER_S.get(question.gpus) if question == _question(question.gpus) else None
    if others:
        row["against"] = _figures(others)
    return row


def _planned(argv: list[str], sources: Path) -> Planned:
    """One plan of the version in a folder, which begins without a cache."""
    environment = os.environ | {"PYTHONPATH": str(sources.resolve())}
    # Older versions keep results in the user's cache. The folder has no sources, which would come first.
    with tempfile.TemporaryDirectory(prefix="ampd-plan-") as folder:
        start_s = time.perf_counter()
        done = subprocess.run(
            [*ampd_command("plan"), *argv],
            capture_output=True,
            text=True,
            check=True,
            env=environment | {"XDG_CACHE_HOME": folder},
            cwd=folder,
        )
        seconds = time.perf_counter() - start_s
    first = _FIRST.search(done.stderr)
    return Planned(seconds, float(first[1]) if first else nan, json.loads(done.stdout))


def _figures(runs: list[Planned]) -> dict[str, Any]:
    plan = runs[-1].plan
    best = plan["layouts"][0]
    # Versions before the search by simulation have one check, and no time at which it ends.
    attainment = best["attainment"]["mean"] if "attainment" in best else best["simulated"]["attainment"]["rounds"]
    return {
        "first_s": statistics.median(run.first_s for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "stopped": plan.get("stopped"),
        "layout": layout_label({"mixed": [], **best}),
        "used_gpus": best["gpus"],
        "attainment": attainment,
    }


def _line(row: dict[str, Any]) -> str:
    paper = "-" if row["paper_s"] is None else f"{row['paper_s']:.2f} s"
    line = f"{row['question']}: {_text(row)}, paper {paper}"
    if (other := row.get("against")) is None:
        return line
    return f"{line}\n    against: {_text(other)}; ours / theirs: {row['seconds'] / other['seconds']:.2f}"


def _text(figures: dict[str, Any]) -> str:
    return (
        f"first {figures['first_s']:.1f} s, end {figures['seconds']:.1f} s{' (budget)' if figures['stopped'] else ''}; "
        f"{figures['layout']} on {figures['used_gpus']} GPUs, attainment {figures['attainment']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
