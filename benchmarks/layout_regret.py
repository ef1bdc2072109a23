"""How far `ampd plan --use-all` and `ampd plan --rate` are from the best of all layouts, by full simulation.

    python -m benchmarks.layout_regret [--gpus 8] [--minutes 100] [--data FOLDER] [--cases 1 2]
        [--budget-s 60] [--jobs 2]

The goodput of a layout is the highest session rate that it carries in long trials, the mean of two seeds that the
planner does not use. Regret of `--use-all` is the goodput that its layout lacks, relative to the best of all layouts
within the GPUs (all degrees, splits and co-location). A layout is left out of the long trials where a short one at a
rate that the best layout carries clearly fails, and left out of the search of its goodput where a long trial of one
seed at 1 % more than the best goodput fails. The best layout of many has some luck, which counts as regret. A plan is
also asked for 70 % of the best goodput: no layout of fewer GPUs than its answer should carry that.

Each trial is kept in --data, so a run that was ended goes on where it was, and another version of the planner is
compared with the same layouts. Delete the folder when the simulator's results have changed. Cases that are not
complete when the minutes are over are left out of the table. The planner has the budget and the processes of `ampd
plan`, and the enumeration has one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from ampd.documents import replacing
from ampd.perf.presets import analytic_model
from ampd.policies import defaults
from ampd.types import GIB, MAX_WAIT, Parallelism, Slo
from benchmarks.rate_search import RateSearch
from planner.case_settings import STORE_GIB_PER_GPU
from planner.layout.fluid import costs_of
from planner.layout.layout import Layout, PlanCase, replicas_of
from planner.layout.plan import Wishes, make_plan
from planner.layout.trial import BUDGET_S, IN_TIME, Horizon, Trial, TrialTask
from planner.simulator.options import SimulationOptions
from workloads.trace import Session, load_trace
from workloads.trace_command import WORKLOADS, Lengths, generate

_SEEDS = (977, 978)
"""Of the enumeration. The planner uses 0 to 5."""
_QUICK = Horizon(30.0, 1.0, 40, 600)
_FULL = Horizon(120.0, 6.0, 100, 6000)
_CLEARLY = 0.05
"""A short trial fails clearly if it attains this much less than the wanted share."""
_ASKED = 0.7
_BETTER = 1.01
_PRECISION = 1.025
_START, _STEP = 0.3, 1.25
"""The first rate that all layouts are tried at, as a share of the highest fluid rate, and the factor of the next."""
_FEW = 4
"""The rate is raised until at most this many layouts carry it."""
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
        fitting = {degree: tokens for degree, tokens in capacities.items() if not 0 < tokens < longest}
        token_bytes = model.profile.kv_bytes_per_token
        assert token_bytes is not None
        return PlanCase(
            sessions,
            0.0,
            Slo(self.ttft_s, self.itl_s),
            model,
            fitting,
            gpus,
            defaults.ROUTING,
            defaults.ORDERING,
            defaults.SLICING,
            defaults.POOLS,
            SimulationOptions(max_wait=MAX_WAIT),
            {degree: int(STORE_GIB_PER_GPU * degree * GIB) // token_bytes for degree in fitting},
        )

    def _sessions(self) -> tuple[Session, ...]:
        if self.trace in WORKLOADS:
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
    Instance("hotpotqa", "qwen3-32b", "h20", 0.45, 0.03),
    Instance("dureader", "llama-3.1-70b", "h200", 5.0, 0.05),
    Instance("coding-agents", "llama-3.1-8b", "h100", 2.0, 0.04),
    Instance("gaia", "llama-3.1-8b", "l40s", 1.0, 0.05),
    Instance("dureader", "qwen3-32b", "h100", 3.0, 0.04),
    Instance("toolbench-answers", "mixtral-8x7b", "h20", 0.5, 0.04),
    Instance("hotpotqa", "llama-3.1-70b", "h200", 0.6, 0.04),
)


@dataclass(frozen=True)
class _Attained:
    """What a search of goodput asks: the share of met rounds, or 0 where sessions are left behind."""

    sustained: float

    @classmethod
    def of(cls, trial: Trial) -> _Attained:
        return cls(trial.met if trial.is_whole and trial.in_time >= IN_TIME else 0.0)


class Enumeration:
    """All layouts of a case, judged by trials that are kept in a file.

    Args:
        end_s: monotonic time after which no trial begins.
    """

    def __init__(self, case: PlanCase, path: Path, end_s: float) -> None:
        self._case, self._path, self._end_s = case, path, end_s
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        bound = costs_of(case).bound
        self.layouts = sorted(every_layout(case.degrees, case.gpus), key=lambda layout: -bound(layout))
        self._highest = bound(self.layouts[0])

    def best(self) -> tuple[Layout, float]:
        """The best layout and its goodput."""
        found = {layout: self.goodput(layout) for layout in self._contenders()}
        for layout in self.layouts:
            rate = _BETTER * max(found.values())
            if (
                layout not in found
                and self._may_carry(layout, rate)
                and self._trial(layout, rate, _FULL).carries(self._case.attainment)
            ):
                found[layout] = self.goodput(layout)
        return max(found.items(), key=lambda item: item[1])

    def goodput(self, layout: Layout) -> float:
        """The mean of the highest rates that it carries, by seed."""
        return fmean(self._goodput(layout, seed) for seed in _SEEDS)

    def carries(self, layout: Layout, rate: float) -> bool:
        """Whether a layout carries a rate, on average over the seeds."""
        if not self._may_carry(layout, rate):
            return False
        trials = [self._trial(layout, rate, _FULL, seed) for seed in _SEEDS]
        return all(trial.is_whole for trial in trials) and all(
            fmean(getattr(trial, name) for trial in trials) >= least
            for name, least in (("met", self._case.attainment), ("in_time", IN_TIME))
        )

    def _contenders(self) -> list[Layout]:
        """The few layouts that carry the highest rates in short trials. `best` tries the others in long trials."""
        standing, rate = self.layouts, _START * self._highest
        while len(standing) > _FEW and rate <= self._highest:
            carrying = [
                layout for layout in standing if self._trial(layout, rate, _QUICK).carries(self._case.attainment)
            ]
            if not carrying:
                ranked = sorted(standing, key=lambda layout: -self._trial(layout, rate, _QUICK).met)
                return ranked[: min(_FEW, ceil(len(ranked) / 2))]
            standing, rate = carrying, rate * _STEP
        return standing[:_FEW]

    def _may_carry(self, layout: Layout, rate: float) -> bool:
        """Whether no short trial at this rate or below fails clearly."""
        tried = self._known.get(str(layout), {}).get("quick", {})
        below = [
            Trial(met, 0.0, 0.0, in_time, is_whole)
            for at, (met, in_time, is_whole) in tried.items()
            if float(at) <= rate
        ]
        below = below or [self._trial(layout, rate, _QUICK)]
        if any(not each.is_whole or each.met < self._case.attainment - _CLEARLY for each in below):
            return False
        quick = self._trial(layout, rate, _QUICK)
        return quick.is_whole and quick.met >= self._case.attainment - _CLEARLY

    def _goodput(self, layout: Layout, seed: int) -> float:
        tried = self._known.get(str(layout), {}).get(f"full {seed}", {})
        known = self._known.get(str(layout), {}).get("goodput", {})
        if str(seed) in known:
            return float(known[str(seed)])
        start = max(
            (float(rate) for rate, (met, *_) in tried.items() if met >= self._case.attainment),
            default=self._highest * _START,
        )
        search = RateSearch(
            lambda rate: _Attained.of(self._trial(layout, rate, _FULL, seed)),
            precision=_PRECISION,
            lowest_rate=self._highest / 50,
            first_step=1.12,
        )
        goodput = search.highest(self._case.attainment, "sustained", start)
        self._keep(layout, "goodput", str(seed), goodput)
        return goodput

    def _trial(self, layout: Layout, rate: float, horizon: Horizon, seed: int = _SEEDS[0]) -> Trial:
        kind = "quick" if horizon is _QUICK else f"full {seed}"
        known = self._known.get(str(layout), {}).get(kind, {}).get(repr(rate))
        if known is None:
            if time.monotonic() > self._end_s:
                raise TimeoutError
            made = TrialTask(layout, rate, horizon, seed).run(self._case)
            known = [made.met, made.in_time, made.is_whole]
            self._keep(layout, kind, repr(rate), known)
        met, in_time, is_whole = known
        return Trial(met, 0.0, 0.0, in_time, is_whole)

    def _keep(self, layout: Layout, kind: str, key: str, value: Any) -> None:
        self._known.setdefault(str(layout), {}).setdefault(kind, {})[key] = value
        with replacing(self._path) as partial:
            partial.write_text(json.dumps(self._known))


def kept_path(folder: Path, instance: Instance, gpus: int) -> Path:
    """The file with the trials of a case."""
    return folder / f"{instance} {gpus}.json".replace(" ", "-")


def every_layout(degrees: Sequence[int], gpus: int) -> Iterator[Layout]:
    """Every split and co-located layout within the GPUs."""
    sides = [
        replicas_of(dict(zip(degrees, counts, strict=True)))
        for counts in product(*(range(gpus // degree + 1) for degree in degrees))
    ]
    for prefill, decode in product(sides, sides):
        if decode and (layout := Layout(prefill, decode)).gpus <= gpus:
            yield layout


def regret(instance: Instance, gpus: int, folder: Path, wishes: Wishes, end_s: float) -> dict[str, Any] | None:
    """One row of the table; None: the time was over."""
    case = instance.case(gpus)
    folder.mkdir(parents=True, exist_ok=True)
    every = Enumeration(case, kept_path(folder, instance, gpus), end_s)
    try:
        best, most = every.best()
        return _row(f"{instance}, {gpus} GPUs", case, every, best, most, wishes)
    except TimeoutError:
        return None


def _row(name: str, case: PlanCase, every: Enumeration, best: Layout, most: float, wishes: Wishes) -> dict[str, Any]:
    start_s = time.monotonic()
    plan = make_plan(case, wishes)
    plan_s = time.monotonic() - start_s
    chosen = plan.layouts[0].layout
    carried = every.goodput(chosen)
    if carried > most:
        best, most = chosen, carried
    asked = replace(case, rate=_ASKED * most)
    fewest = make_plan(asked, replace(wishes, uses_all=False, top=1)).layouts[0].layout
    smaller = [layout for layout in every.layouts if layout.gpus < fewest.gpus and every.carries(layout, asked.rate)]
    return {
        "case": name,
        "layouts": len(every.layouts),
        "best": f"{best} {most:.3g}/s",
        "chosen": f"{chosen} {carried:.3g}/s",
        "regret": 1 - carried / most if most else 0.0,
        "fewest": str(fewest),
        "fewest_carries": every.carries(fewest, asked.rate),
        "smaller": [str(layout) for layout in smaller],
        "plan_s": plan_s,
        "stopped": plan.stopped,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[4])
    parser.add_argument("--cases", type=int, nargs="+", default=range(1, len(INSTANCES) + 1), help="numbers, from 1")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--jobs", type=int, help="processes of the planner; default: one per core")
    parser.add_argument("--data", type=Path, default=Path("layout-regret"))
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    wishes = Wishes(uses_all=True, jobs=options.jobs, budget_s=options.budget_s)
    rows = []
    for gpus, number in product(options.gpus, options.cases):
        row = regret(INSTANCES[number - 1], gpus, options.data, wishes, end_s)
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
        print(f"        planned in {row['plan_s']:.0f} s{', stopped' if row['stopped'] else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
