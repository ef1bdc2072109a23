"""How far `ampd plan --use-all` and `ampd plan --rate` are from the best of all layouts, by full simulation.

    python -m benchmarks.layout_regret [--gpus 4] [--minutes 20] [--data FOLDER] [--budget-s 120]

Every layout within the GPUs (all degrees, splits and co-location) is tried, with a seed that the planner does not use.
Regret of `--use-all` is the goodput that its layout lacks, relative to the best one. A layout is left out where
computing alone takes too long for the best goodput so far, or where it does not carry 2 % more. The best layout of one
seed has some luck, which counts as regret. A plan is also asked for 70 % of the best goodput: no layout of fewer GPUs
than its answer should carry that.

Each trial is kept in --data, so a run that was ended goes on where it was. Delete the folder when the simulator has
changed. Cases that are not complete when the minutes are over are left out of the table. The planner runs in one
process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ampd.documents import replacing
from ampd.perf.presets import analytic_model
from ampd.policies import defaults
from ampd.types import Parallelism, Slo
from planner.layout.fluid import costs_of
from planner.layout.goodput_plan import Wishes, make_goodput_plan
from planner.layout.layout import Layout, replicas_of
from planner.layout.search import PlanCase
from planner.layout.trial import LONG, GoodputTask, TrialTask
from planner.simulator.options import SimulationOptions
from workloads.generate import Lengths, generate
from workloads.trace import Session, load_trace

_JUDGE = 977
"""The seed of the enumeration. The planner uses 0, 1 and 2."""
_ASKED = 0.7
_BETTER = 1.02
_LOWEST = 0.01
"""Sessions per second that are tried first where no layout so far carries any rate."""
_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Instance:
    """A workload on a model and a kind of GPU. `trace`: a shipped trace, or the name of a generated workload."""

    trace: str
    model: str
    gpu: str
    ttft_s: float
    itl_s: float

    def case(self, gpus: int) -> PlanCase:
        """The case without a rate."""
        model = analytic_model(self.model, self.gpu)
        sessions = self._sessions()
        longest = max(session.max_context_tokens for session in sessions)
        capacities = {
            degree: model.kv_capacity_tokens(Parallelism(degree)) or 0
            for degree in _DEGREES
            if degree <= gpus and Parallelism(degree) in model.parallelisms
        }
        return PlanCase(
            sessions,
            0.0,
            Slo(self.ttft_s, self.itl_s),
            model,
            {degree: tokens for degree, tokens in capacities.items() if not 0 < tokens < longest},
            gpus,
            defaults.ROUTING,
            defaults.ORDERING,
            defaults.SLICING,
            SimulationOptions(),
        )

    def _sessions(self) -> tuple[Session, ...]:
        if self.trace in ("toolbench", "gaia"):
            return tuple(generate(self.trace, 300, 1.0, 0, Lengths.PER_SESSION))
        return tuple(load_trace(self.trace))

    def __str__(self) -> str:
        return f"{self.trace} {self.model} {self.gpu}"


INSTANCES = (
    Instance("tau-bench-airline", "llama-3.1-8b", "l40s", 0.5, 0.05),
    Instance("toolbench-answers", "llama-3.1-8b", "h20", 0.5, 0.03),
    Instance("tau-bench-airline", "qwen3-32b", "h20", 0.5, 0.04),
    Instance("toolbench", "qwen3-32b", "h100", 0.5, 0.04),
    Instance("gaia", "mixtral-8x7b", "h200", 1.0, 0.04),
    Instance("toolbench", "llama-3.1-70b", "h200", 1.0, 0.05),
)


class Kept:
    """Outcomes of trials of a case, in one file of a folder."""

    def __init__(self, folder: Path, case: PlanCase, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._case = case
        self._path = folder / f"{name}.json"
        self._known: dict[str, float] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def carries(self, layout: Layout, rate: float) -> bool:
        """Whether a layout carries a rate."""
        task = TrialTask(layout, rate, LONG, _JUDGE)
        return bool(self._outcome(f"{layout} at {rate}", lambda: task.run(self._case).carries(self._case.attainment)))

    def goodput(self, layout: Layout, start: float) -> float:
        """The highest session rate that it carries. `start`: about that rate."""
        return self._outcome(str(layout), lambda: GoodputTask(layout, start, _JUDGE).run(self._case).goodput)

    def _outcome(self, key: str, make: Callable[[], float]) -> float:
        if key not in self._known:
            self._known[key] = float(make())
            with replacing(self._path) as partial:
                partial.write_text(json.dumps(self._known))
        return self._known[key]


def every_layout(degrees: Sequence[int], gpus: int) -> Iterator[Layout]:
    """Every split and co-located layout within the GPUs."""
    sides = [
        replicas_of(dict(zip(degrees, counts, strict=True)))
        for counts in product(*(range(gpus // degree + 1) for degree in degrees))
    ]
    for prefill, decode in product(sides, sides):
        if decode and (layout := Layout(prefill, decode)).gpus <= gpus:
            yield layout


def regret(instance: Instance, gpus: int, folder: Path, budget_s: float, end_s: float) -> dict[str, Any] | None:
    """One row of the table; None: the time was over."""
    case = instance.case(gpus)
    kept = Kept(folder, case, f"{instance} {gpus}".replace(" ", "-"))
    bound = costs_of(case).bound
    layouts = sorted(every_layout(case.degrees, gpus), key=lambda layout: -bound(layout))
    best, most = layouts[0], kept.goodput(layouts[0], 0.6 * bound(layouts[0]))
    for layout in layouts[1:]:
        if time.monotonic() > end_s:
            return None
        if bound(layout) > _BETTER * most and kept.carries(layout, _BETTER * most or _LOWEST):
            best, most = layout, kept.goodput(layout, _BETTER * most or _LOWEST)
    start_s = time.process_time()
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=budget_s))
    plan_s = time.process_time() - start_s
    chosen = plan.layouts[0].layout
    carried = kept.goodput(chosen, most)
    asked = replace(case, rate=_ASKED * most)
    fewest = make_goodput_plan(asked, Wishes(top=1, jobs=1, budget_s=budget_s)).layouts[0].layout
    smaller = [layout for layout in layouts if layout.gpus < fewest.gpus and bound(layout) >= asked.rate]
    return {
        "case": f"{instance}, {gpus} GPUs",
        "layouts": len(layouts),
        "best": f"{best} {most:.3g}/s",
        "chosen": f"{chosen} {carried:.3g}/s",
        "regret": 1 - carried / max(most, carried),
        "fewest": str(fewest),
        "fewest_carries": kept.carries(fewest, asked.rate),
        "smaller": [str(layout) for layout in smaller if kept.carries(layout, asked.rate)],
        "plan_s": plan_s,
        "stopped": plan.stopped,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[4])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--data", type=Path, default=Path("layout-regret"))
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    rows = []
    for gpus, instance in product(options.gpus, INSTANCES):
        row = regret(instance, gpus, options.data, options.budget_s, end_s)
        if row is None:
            break
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    rows.sort(key=lambda row: -row["regret"])
    if options.json:
        print(json.dumps({"cases": rows}, indent=1))
        return 0
    if rows:
        mean = sum(row["regret"] for row in rows) / len(rows)
        print(f"\n{len(rows)} cases: regret {mean:.1%} on average, {rows[0]['regret']:.1%} at worst")
    for row in rows:
        print(f"{row['regret']:>6.1%}  {row['case']}, {row['layouts']} layouts: {row['chosen']} (best: {row['best']})")
        carries = "carries" if row["fewest_carries"] else "does not carry"
        smaller = f"; these too: {', '.join(row['smaller'])}" if row["smaller"] else ""
        print(f"        of 70 % of the best goodput: {row['fewest']} {carries} it{smaller}")
        print(f"        planned in {row['plan_s']:.0f} s of processor time{', stopped' if row['stopped'] else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
