"""How far the goodput of a plan's trials is from that of a simulation that lasts many times as long.

    python -m benchmarks.trial_error [--cases 1 2] [--lifetimes 24] [--seeds 3] [--minutes 20]

The long simulation begins with an empty cluster. Sessions arrive for `--lifetimes` times as long as a session takes at
its targets. It runs until the last session has ended, and all rounds and sessions count. Its goodput and those of the
trials are the highest rates that are carried, each by its own search, so an error of 5 % is within their precision.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Any

from benchmarks.layout_regret import Instance
from benchmarks.rate_search import RateSearch
from benchmarks.sustained import in_time_share
from planner.layout.fluid import costs_of
from planner.layout.layout import Layout, PlanCase
from planner.layout.trial import IN_TIME, LONG, SHORT, Horizon, TrialTask
from planner.simulator.simulate import simulate

_PRECISION = 1.02
_LONG_SEED = 4711


@dataclass(frozen=True)
class Question:
    """A layout whose goodput is searched."""

    instance: Instance
    layout: Layout

    @property
    def case(self) -> PlanCase:
        return self.instance.case(self.layout.gpus)

    def __str__(self) -> str:
        return f"{self.instance}, {self.layout}"


_GAIA = Instance("gaia", "mixtral-8x7b", "h200", 1.0, 0.04)
_TAU = Instance("tau-bench-airline", "qwen3-32b", "h20", 0.5, 0.04)
_TOOLBENCH = Instance("toolbench", "qwen3-32b", "h100", 0.5, 0.04)
_GAIA_16 = Instance("gaia", "qwen3-32b", "h20", 1.5, 0.04)
QUESTIONS = (
    Question(_TAU, Layout(((4, 1),), ((4, 1),))),
    Question(_TAU, Layout((), ((4, 1),))),
    Question(_TOOLBENCH, Layout(((1, 4),), ((4, 1),))),
    Question(_TOOLBENCH, Layout((), ((4, 1),))),
    Question(_GAIA, Layout((), ((2, 2),))),
    Question(_GAIA, Layout(((4, 1),), ((4, 1),))),
    Question(_GAIA_16, Layout(((2, 3),), ((8, 1),))),
    Question(_GAIA_16, Layout(((4, 3),), ((4, 1),))),
    Question(_GAIA_16, Layout(((8, 1),), ((8, 1),))),
)


@dataclass(frozen=True)
class _Carried:
    """1.0: the rate is carried."""

    share: float


def long_simulation(case: PlanCase, layout: Layout, rate: float, lifetimes: float) -> tuple[float, float]:
    """The shares of the rounds that met their targets, and of the sessions that ended in time."""
    population = case.population
    rng = random.Random(_LONG_SEED)
    count = round(rate * lifetimes * population.lifetime_s)
    sessions, now_s = [], 0.0
    for number, life in enumerate(islice(population.draws(rng), count)):
        sessions.append(life.session.model_copy(update={"session_id": str(number), "arrival_s": now_s}))
        now_s += rng.expovariate(rate)
    run = simulate(
        sessions,
        case.cluster_of(layout),
        case.model,
        case.new_policies(),
        case.slo,
        case.options,
    )
    return run.attainment(case.slo).rounds, in_time_share(run.rounds, sessions, case.slo)


def long_goodput(case: PlanCase, layout: Layout, start: float, lifetimes: float) -> float:
    """The highest rate that a layout carries in the long simulation. `start`: about right."""

    def carries(rate: float) -> bool:
        met, in_time = long_simulation(case, layout, rate, lifetimes)
        return met >= case.attainment and in_time >= IN_TIME

    return _goodput(carries, start)


def _goodput(carries: Any, start: float) -> float:
    search = RateSearch(lambda rate: _Carried(float(carries(rate))), _PRECISION, lowest_rate=start / 20, first_step=1.1)
    return search.highest(1.0, "share", start)


def row(question: Question, lifetimes: float, seeds: int) -> dict[str, Any]:
    """The goodputs of one layout."""
    case, layout = question.case, question.layout
    start = costs_of(case).with_queues().bound(layout)
    found: dict[str, Any] = {"case": str(question)}
    for name, horizon in (("short", SHORT), ("long", LONG)):
        start_s = time.process_time()
        values = [_trials_goodput(case, layout, horizon, seed, start) for seed in range(seeds)]
        found[name], found[f"{name}_seeds"] = fmean(values), values
        found[f"{name}_s"] = (time.process_time() - start_s) / seeds

    start_s = time.process_time()
    found["reference"] = long_goodput(case, layout, found["long"] or start, lifetimes)
    found["reference_s"] = time.process_time() - start_s
    return found


def _trials_goodput(case: PlanCase, layout: Layout, horizon: Horizon, seed: int, start: float) -> float:
    task = TrialTask(layout, start, horizon, seed)
    return _goodput(lambda rate: replace(task, rate=rate).run(case).carries(case.attainment), start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, nargs="+", default=range(1, len(QUESTIONS) + 1), help="numbers, from 1")
    parser.add_argument("--lifetimes", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    for number in options.cases:
        if time.monotonic() > end_s:
            break
        found = row(QUESTIONS[number - 1], options.lifetimes, options.seeds)
        print(json.dumps(found), file=sys.stderr)
        errors = ", ".join(
            f"{name} {found[name]:.3g}/s ({found[name] / found['reference'] - 1:+.0%})" for name in ("short", "long")
        )
        print(f"{found['case']}: {found['reference']:.3g}/s in the long simulation; {errors}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
