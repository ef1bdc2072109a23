"""A live graph for a long time, under replayed load, random faults and workers that come and go.

    python -m benchmarks.soak [--engine NAME] [--minutes 30] [--seed 0] [--samples FILE] [--json]

The graph and the faults are those of `benchmarks.faults`. Events follow each other until the time is over: a random
fault at a random moment of a round, or a worker that is added, drained or killed. Each process is sampled every few
seconds. Printed: rounds by ending, events, and for the first process of each kind how each figure changed over the
second half. The exit is 1 if a figure grows, or if an invariant was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ampd.child_process import exit_now
from benchmarks.soak import failures
from benchmarks.soak.soak import SoakResult, soak
from benchmarks.soak.soaked import ENGINES
from benchmarks.soak.trend import Trend

_MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engine", choices=list(ENGINES), default="modelled", help="engine of the workers")
    parser.add_argument("--seed", type=int, default=0, help="of the events and of the load")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes in this folder")
    parser.add_argument("--samples", type=Path, help="file for all samples, as lines of JSON")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ampd-soak-") as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        soaked = ENGINES[options.engine]()
        result = asyncio.run(soak(folder, options.minutes, options.seed, samples=options.samples, soaked=soaked))
    print(json.dumps(result.as_dict(), indent=1) if options.json else report(result))
    return int(bool(result.growing or result.violations))


def report(result: SoakResult) -> str:
    """Rounds, events, violations and the table of figures, as Markdown."""
    rounds = [f"{result.rounds[name]} {name}" for name in ("accepted", "completed", "failed", "lost", "wrong", "left")]
    events = [f"{name} {count}" for name, count in sorted(result.events.items())]
    parts = [
        f"{result.minutes:g} minutes, seed {result.seed}, commit {result.commit}: {', '.join(rounds)}.",
        f"{result.events.total()} events, {result.missed} of them after their moment: {', '.join(events)}.",
        f"{len(result.ended_late)} sessions were ended by the harness, because their event or their last round failed.",
        *failures.lines(result.failures),
        *[f"VIOLATION: {text}" for text in result.violations],
        table(result.trends),
    ]
    growing = [f"{each.figure} of {each.process}" for each in result.growing]
    return "\n\n".join([*parts, f"Growing: {', '.join(growing)}." if growing else "Flat."])


def table(found: Sequence[Trend]) -> str:
    """A row per figure and a column per process: median, and growth over the second half."""
    processes = list(dict.fromkeys(each.process for each in found))
    cells = {(each.figure, each.process): _cell(each) for each in found}
    rows = [["figure", *processes], ["---"] * (len(processes) + 1)]
    for figure in sorted({each.figure for each in found}):
        rows.append([figure, *(cells.get((figure, process), "-") for process in processes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(trend: Trend) -> str:
    unit, text = (_MIB, ".1f") if trend.figure.endswith("bytes") else (1, ".0f")
    mark = " **grows**" if trend.is_growing else ""
    return f"{trend.typical / unit:{text}} {trend.growth / unit:+.1f}{' MiB' * (unit > 1)}{mark}"


if __name__ == "__main__":
    exit_now(main())
