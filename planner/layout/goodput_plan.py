"""The plan of `--use-all`: the layouts that carry most, their figures, and what the next GPUs would buy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import floor, log10
from statistics import fmean

from planner.layout.appraisal import SEEDS, Appraised, Appraiser, Figure
from planner.layout.fluid import proposals
from planner.layout.formulation import Demand
from planner.layout.goodput_search import Search
from planner.layout.layout import Layout
from planner.layout.neighbours import neighbours
from planner.layout.search import PlanCase, demand_of
from planner.layout.trial import SHORT, TrialTask, Variation
from planner.layout.trials import BUDGET_S, TimeOverError, Trials

_SEEDS_OF_ALL = (0, 1)
"""The seeds by which the layouts are compared."""
_NEXT = 6
"""Most layouts that are tried with more GPUs."""
_BETTER = 1.02
"""The rate at which they are tried, over the present goodput."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """More GPUs, the best layout with them, and how much more it carries.

    Attributes:
        gain: sessions per second, seed by seed.
    """

    more_gpus: int
    best: Appraised
    gain: Figure


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """The layouts, best first, with their figures.

    Attributes:
        rate: sessions per second that the layouts were checked at.
        variations: attainment of the best layout under other circumstances.
        stopped: why the search ended early; empty: it did not.
        trials: how many simulations, or searches of goodput, were made.
    """

    layouts: list[Appraised]
    rate: float
    attainment: float
    demand: Demand
    variations: list[tuple[Variation, Figure]]
    next_step: NextStep | None
    stopped: str
    trials: int

    @property
    def carries(self) -> bool:
        """Whether the best layout carries the rate."""
        return self.layouts[0].carries_rate


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to search.

    Attributes:
        top: layouts to show.
        jobs: processes; None: one per core.
        budget_s: seconds for the simulations.
    """

    top: int = 3
    jobs: int | None = None
    budget_s: float = BUDGET_S


def make_goodput_plan(case: PlanCase, wishes: Wishes) -> GoodputPlan:
    """Plan. Ctrl-C ends the search, and the plan has the best layouts so far."""
    with Trials(case, wishes.jobs, wishes.budget_s) as trials:
        return _Planner(case, wishes, trials).plan()


class _Planner:
    """One plan in the making."""

    def __init__(self, case: PlanCase, wishes: Wishes, trials: Trials) -> None:
        self._case, self._wishes, self._trials = case, wishes, trials
        self._search = Search(case, trials)
        self._appraiser = Appraiser(case, trials, case.rate)
        self._shown: list[Layout] = []
        self._next: Layout | None = None
        self._stopped = ""

    def plan(self) -> GoodputPlan:
        with self._until_stopped():
            self._search.most()
            self._compare()
            self._appraiser.vary(self._shown[0])
            self._look_ahead()
        return self._plan()

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            yield
        except TimeOverError:
            self._stopped = f"the time was over (--budget-s {self._wishes.budget_s:g})"
        except KeyboardInterrupt:
            if not self._search.best:
                raise
            self._stopped = "it was interrupted"

    def _compare(self) -> None:
        """Rank the best layouts of the search by longer trials, and the best one with more seeds."""
        appraiser, search = self._appraiser, self._search
        finalists = search.best[: self._wishes.top]
        appraiser.search_goodput(finalists, _SEEDS_OF_ALL, search.rate)
        seeds = len(_SEEDS_OF_ALL)
        self._shown = sorted(finalists, key=lambda layout: -fmean(appraiser.goodputs(layout)[:seeds]))
        appraiser.search_goodput(self._shown[:1], range(SEEDS))
        appraiser.rate = appraiser.rate or _rounded_down(fmean(appraiser.goodputs(self._shown[0])))
        appraiser.check(self._shown)

    def _look_ahead(self) -> None:
        """The best layout with the smallest number of GPUs more that makes another replica."""
        best, step = self._shown[0], min(self._case.degrees)
        goodputs = self._appraiser.goodputs(best)
        if not goodputs or not fmean(goodputs):
            return
        gpus = self._case.gpus + step
        near = neighbours(best, self._case.degrees, gpus)
        larger = [
            layout for layout in dict.fromkeys([*proposals(self._search.costs, gpus), *near]) if layout.gpus > best.gpus
        ]
        larger = sorted(larger, key=lambda layout: -self._search.costs.bound(layout))[:_NEXT]
        rate = _BETTER * fmean(goodputs)
        tasks = [TrialTask(layout, rate, SHORT, self._case.options.seed) for layout in larger]
        trials = self._trials.trials(tasks)
        if larger:
            best_met = max(range(len(larger)), key=lambda index: trials[index].met)
            self._appraiser.search_goodput([larger[best_met]], range(SEEDS))
            self._next = larger[best_met]

    def _plan(self) -> GoodputPlan:
        appraiser = self._appraiser
        shown = self._shown or self._search.best[: self._wishes.top]
        appraiser.rate = appraiser.rate or _rounded_down(self._search.rate)
        layouts = [appraiser.appraised(layout) for layout in shown]
        case = replace(self._case, rate=appraiser.rate)
        next_step = None
        if self._next is not None:
            pairs = zip(appraiser.goodputs(self._next), appraiser.goodputs(shown[0]), strict=False)
            gain = Figure.of([after - before for after, before in pairs])
            next_step = NextStep(min(case.degrees), appraiser.appraised(self._next), gain)
        return GoodputPlan(
            layouts,
            appraiser.rate,
            case.attainment,
            demand_of(case),
            appraiser.variations(shown[0]),
            next_step,
            self._stopped,
            self._trials.made,
        )


def _rounded_down(rate: float) -> float:
    """To two significant digits."""
    if rate <= 0:
        return 1.0
    step = 10.0 ** (floor(log10(rate)) - 1)
    return round(floor(rate / step) * step, 12)
