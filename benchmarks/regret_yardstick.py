"""Whether the layouts that trials find best are the best in simulations that last many times as long.

    python -m benchmarks.regret_yardstick --data FOLDER [--gpus 8] [--cases 1 2] [--top 3]
        [--lifetimes 24] [--minutes 60]

Regret (`benchmarks.layout_regret`) is measured by trials of the same kind as the planner's. This takes the `--top` best
layouts of each case whose goodput was searched there. It searches their goodput by a simulation that begins empty,
lasts `--lifetimes` times as long as a session takes at its targets, and counts everything. The regret of the first one,
relative to the best of them, is that of the trials as a yardstick.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.layout_regret import INSTANCES, every_layout, kept_path
from benchmarks.trial_error import long_goodput
from planner.layout.layout import Layout, PlanCase


def searched(case: PlanCase, path: Path) -> list[tuple[Layout, float]]:
    """The layouts with a goodput in a file of `benchmarks.layout_regret`, best first."""
    known = json.loads(path.read_text())
    found = [
        (layout, fmean(known[str(layout)]["goodput"].values()))
        for layout in every_layout(case.degrees, case.gpus)
        if "goodput" in known.get(str(layout), {})
    ]
    return sorted(found, key=lambda item: -item[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--cases", type=int, nargs="+", default=range(1, len(INSTANCES) + 1), help="numbers, from 1")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--lifetimes", type=float, default=24.0)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    rows = list(_rows(options, time.monotonic() + 60 * options.minutes))
    regrets = [row["regret"] for row in rows]
    print(f"\n{len(rows)} cases: {fmean(regrets):.1%} on average, {max(regrets):.1%} at worst")
    return 0


def _rows(options: argparse.Namespace, end_s: float) -> Iterator[dict[str, Any]]:
    for number in options.cases:
        instance = INSTANCES[number - 1]
        path = kept_path(options.data, instance, options.gpus)
        if not path.exists() or time.monotonic() > end_s:
            continue
        case = instance.case(options.gpus)
        best = searched(case, path)[: options.top]
        found = {str(layout): long_goodput(case, layout, goodput, options.lifetimes) for layout, goodput in best}
        row = {"regret": 1 - found[str(best[0][0])] / max(found.values())}
        print(f"{row['regret']:>6.1%}  {instance}", flush=True)
        for layout, goodput in best:
            print(f"        {layout}: {goodput:.3g}/s in trials, {found[str(layout)]:.3g}/s long", flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
