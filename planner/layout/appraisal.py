"""The figures of layouts, over several seeds: attainment at a rate, goodput, and both under other circumstances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import Any

from planner.intervals import mean_interval
from planner.layout.layout import Layout
from planner.layout.search import PlanCase
from planner.layout.trial import AS_PLANNED, LONG, Carried, GoodputTask, Trial, TrialTask, Variation
from planner.layout.trials import Trials
from planner.sustained import IN_TIME

SEEDS = 3
"""Seeds of the figures of the best layout."""

VARIATIONS = (
    Variation("20 % less load", rate=0.8),
    Variation("20 % more load", rate=1.2),
    Variation("GPUs 20 % slower", seconds=1.25),
    Variation("prompts 25 % longer", tokens=1.25),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over seeds with its 95 % interval; None: one seed has no interval."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float], most: float | None = None, least: float | None = 0.0) -> Figure:
        """Of one value per seed. The interval stays between `least` and `most`; None: no bound."""
        mean, half, seeds = mean_interval(values)
        if not isfinite(half):
            return cls(mean, None, None, seeds)
        high = mean + half if most is None else min(mean + half, most)
        low = mean - half if least is None else max(mean - half, min(least, mean))
        return cls(mean, low, high, seeds)


@dataclass(frozen=True, slots=True)
class Appraised:
    """A layout with its figures.

    Attributes:
        attainment: share of the rounds within both targets at the plan's rate.
        carries_rate: whether it carries that rate, on average over the seeds.
        goodput: the highest rate that it carries, sessions per second; None: the time did not suffice.
        curve: trials by rate, ascending.
        simulated: the result of one trial at the plan's rate.
    """

    layout: Layout
    attainment: Figure
    carries_rate: bool
    goodput: Figure | None
    curve: Sequence[tuple[float, Trial]]
    simulated: dict[str, Any]


class Appraiser:
    """Makes trials of layouts, and reads figures from what was made."""

    def __init__(self, case: PlanCase, trials: Trials, rate: float) -> None:
        self._case = case
        self._trials = trials
        self.rate = rate
        self._start = rate or 1.0

    def check(self, layouts: Sequence[Layout]) -> None:
        """Trials at the plan's rate, with all seeds."""
        self._trials.trials([task for layout in layouts for task in self._checks(layout)])

    def promising(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts that carry the rate in one longer trial, best first."""
        tasks = [replace(self._checks(layout)[0], stops=True) for layout in layouts]
        trials = dict(zip(layouts, self._trials.trials(tasks), strict=True))
        passed = [layout for layout, trial in trials.items() if trial.carries(self._case.attainment)]
        return sorted(passed, key=lambda layout: -trials[layout].met)

    def search_goodput(self, layouts: Sequence[Layout], seeds: Sequence[int], start: float | None = None) -> None:
        """Search the highest rate of each layout with each seed.

        Args:
            start: a rate that is about right; None: that of the call before.
        """
        self._start = start or self._start
        self._trials.carried([self._goodput_task(layout, seed) for layout in layouts for seed in seeds])

    def vary(self, layout: Layout) -> None:
        """Trials under other circumstances."""
        self._trials.trials([task for each in VARIATIONS for task in self._checks(layout, each)])

    def variations(self, layout: Layout) -> list[tuple[Variation, Figure]]:
        """Attainment under the circumstances that were tried."""
        found = []
        for each in VARIATIONS:
            known = [self._trials.known(task) for task in self._checks(layout, each)]
            if shares := [trial.met for trial in known if trial is not None]:
                found.append((each, Figure.of(shares, 1.0)))
        return found

    def appraised(self, layout: Layout) -> Appraised:
        """The figures that are known. At least one trial at the rate is made, whatever time is left."""
        self._trials.make(self._checks(layout)[0])
        known = self._known_checks(layout)
        carried = self.carried(layout)
        assert known[0].result is not None
        return Appraised(
            layout,
            Figure.of([trial.met for trial in known], 1.0),
            _carries(known, self._case.attainment),
            Figure.of([each.goodput for each in carried]) if carried else None,
            sorted(carried[0].tried.items()) if carried else [(self.rate, known[0])],
            known[0].result,
        )

    def attainments(self, layout: Layout) -> list[float]:
        """Attainment at the plan's rate by seed, as far as known."""
        return [trial.met for trial in self._known_checks(layout)]

    def carries(self, layout: Layout) -> bool:
        """Whether it carries the plan's rate, on average over the seeds that are known."""
        known = self._known_checks(layout)
        return bool(known) and _carries(known, self._case.attainment)

    def goodputs(self, layout: Layout) -> list[float]:
        """Goodput by seed, as far as known."""
        return [each.goodput for each in self.carried(layout)]

    def carried(self, layout: Layout) -> list[Carried]:
        """The searches of goodput that were made, by seed."""
        made = [self._trials.known(self._goodput_task(layout, seed)) for seed in range(SEEDS)]
        return [each for each in made if each is not None]

    def _known_checks(self, layout: Layout) -> list[Trial]:
        known = [self._trials.known(task) for task in self._checks(layout)]
        return [trial for trial in known if trial is not None]

    def _checks(self, layout: Layout, variation: Variation = AS_PLANNED) -> list[TrialTask]:
        return [
            TrialTask(
                layout,
                self.rate,
                LONG,
                self._case.options.seed + seed,
                stops=False,
                keeps_result=not seed and variation is AS_PLANNED,
                variation=variation,
            )
            for seed in range(SEEDS)
        ]

    def _goodput_task(self, layout: Layout, seed: int) -> GoodputTask:
        at_start = self._trials.known(self._checks(layout)[seed]) if self._start == self.rate else None
        return GoodputTask(layout, self._start, self._case.options.seed + seed, at_start)


def _carries(trials: Sequence[Trial], attainment: float) -> bool:
    return fmean(trial.met for trial in trials) >= attainment and fmean(trial.in_time for trial in trials) >= IN_TIME
