"""The plan: the layouts that trials found best, their figures, and what the next GPUs would buy.

Best are the fewest GPUs that carry the rate, or with `--use-all` the most that all GPUs carry. Where none carry the
rate, the layout of all GPUs that carries most is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, floor, log10
from statistics import fmean

from planner.layout.appraisal import SEEDS, Appraised, Appraiser, Figure
from planner.layout.fluid import costs_of, fewest_gpus, proposals
from planner.layout.formulation import Demand
from planner.layout.goodput_search import Search
from planner.layout.layout import Layout
from planner.layout.neighbours import neighbours, scaled
from planner.layout.search import PlanCase, demand_of
from planner.layout.trial import ONCE, SHORT, TimeOverError, TrialTask, Variation
from planner.layout.trials import BUDGET_S, Trials

MOST_GPUS = 32
"""Layouts are tried for a part of a cluster that needs more GPUs than these."""
_SEARCH_SHARE = 0.8
"""The search for a part of a cluster has this share of the time. The rest is for the check of the whole cluster."""
_CHECKED = 4
"""Most layouts of as many GPUs that are tried for longer, where the fewest GPUs are wanted."""
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
        has_fewest_gpus: the first layout is the smallest that was found to carry the rate. Else it carries the most.
        rate: sessions per second that the layouts were checked at.
        variations: attainment of the best layout under other circumstances.
        stopped: why the simulations ended early; empty: they did not.
        is_decided: the search had ended before that, so only figures are missing.
        trials: how many simulations, or searches of goodput, were made.
        scale: the search was made for this part of the cluster and of the rate (2: one half), because whole ones are
            too large. The figures of `variations` are for this part.
        is_checked: the whole cluster was simulated. Else all figures are for the part that was searched.
    """

    layouts: list[Appraised]
    rate: float
    attainment: float
    demand: Demand
    variations: list[tuple[Variation, Figure]]
    next_step: NextStep | None
    stopped: str
    trials: int
    has_fewest_gpus: bool = False
    is_decided: bool = True
    scale: int = 1
    is_checked: bool = True

    @property
    def carries(self) -> bool:
        """Whether the best layout carries the rate."""
        return self.layouts[0].carries_rate


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to search.

    Attributes:
        uses_all: the most goodput of all GPUs, instead of the fewest GPUs that carry the rate.
        top: layouts to show.
        jobs: processes; None: one per core.
        budget_s: seconds for the simulations.
    """

    uses_all: bool = False
    top: int = 3
    jobs: int | None = None
    budget_s: float = BUDGET_S


def make_goodput_plan(case: PlanCase, wishes: Wishes) -> GoodputPlan:
    """Plan. Ctrl-C ends the search, and the plan has the best layouts so far."""
    end_s = time.monotonic() + wishes.budget_s
    scale = scale_of(case, uses_all=wishes.uses_all)
    part = replace(case, gpus=case.gpus // scale, rate=case.rate / scale)
    search_s = wishes.budget_s
    if scale > 1:
        search_s *= _SEARCH_SHARE
        print(f"searching layouts for 1/{scale} of the {case.gpus} GPUs", file=sys.stderr)
    with Trials(part, wishes.jobs, search_s) as trials:
        plan = _Planner(part, wishes, trials).plan()
    return plan if scale == 1 else whole_plan(case, plan, scale, wishes, end_s)


def scale_of(case: PlanCase, *, uses_all: bool) -> int:
    """The part of a cluster that layouts are tried for, as its denominator."""
    gpus = case.gpus
    if not uses_all:
        gpus = fewest_gpus(costs_of(case), case.gpus, case.rate) or case.gpus
    return max(ceil(gpus / MOST_GPUS), 1)


def whole_plan(case: PlanCase, plan: GoodputPlan, scale: int, wishes: Wishes, end_s: float) -> GoodputPlan:
    """The plan of a part of the cluster for the whole one, whose first layout is simulated once.

    `end_s`: monotonic time at which this simulation is given up. Ctrl-C ends it too. Without it the figures are those
    of the part.
    """
    rate = plan.rate * scale
    demand = demand_of(replace(case, rate=rate))
    best = plan.layouts[0]
    layout = scaled(best.layout, scale)
    whole = replace(plan, rate=rate, demand=demand, next_step=None, scale=scale)
    try:
        trial = TrialTask(layout, rate, ONCE, case.options.seed, stops=False, keeps_result=True).run(case, end_s)
    except (TimeOverError, KeyboardInterrupt) as end:
        curve = [(rate * scale, trial) for rate, trial in best.curve]
        unchecked = replace(best, layout=layout, goodput=None, curve=curve)
        stopped = plan.stopped or (_INTERRUPTED if isinstance(end, KeyboardInterrupt) else _time_over(wishes.budget_s))
        return replace(whole, layouts=[unchecked], stopped=stopped, is_checked=False)
    assert trial.result is not None
    attained = Figure.of([trial.met], 1.0)
    checked = Appraised(layout, attained, trial.carries(case.attainment), None, [(rate, trial)], trial.result)
    return replace(whole, layouts=[checked])


class _Planner:
    """One plan in the making."""

    def __init__(self, case: PlanCase, wishes: Wishes, trials: Trials) -> None:
        self._case, self._wishes, self._trials = case, wishes, trials
        self._search = Search(case, trials)
        self._appraiser = Appraiser(case, trials, case.rate)
        self._shown: list[Layout] = []
        self._has_fewest = False
        self._is_decided = False
        self._next: Layout | None = None
        self._stopped = ""

    def plan(self) -> GoodputPlan:
        with self._until_stopped():
            if self._wishes.uses_all or not self._find_fewest():
                self._search.most()
                self._compare()
            self._is_decided = True
            self._appraiser.vary(self._shown[0])
            self._look_ahead()
        return self._plan()

    def _find_fewest(self) -> bool:
        """Whether a layout carries the rate, in long trials with several seeds too. It has the fewest such GPUs."""
        self._search.fewest()
        tried: set[Layout] = set()
        while True:
            for layouts in _by_gpus(layout for layout in self._search.carrying if layout not in tried):
                tried.update(layouts)
                if (best := self._confirmed(layouts)) is not None:
                    rest = [layout for layout in self._search.carrying if layout not in tried]
                    self._show_fewest(best, [*layouts, *rest])
                    return True
            if not self._search.more():
                return False

    def _confirmed(self, layouts: Sequence[Layout]) -> Layout | None:
        """The best layout among these that carries the rate; None if there is none."""
        for layout in self._appraiser.promising(layouts[:_CHECKED]):
            self._appraiser.check([layout])
            if self._appraiser.carries(layout):
                return layout
        return None

    def _show_fewest(self, best: Layout, others: Sequence[Layout]) -> None:
        """Figures of the best layout, then of alternatives: two of as many GPUs, then larger ones."""
        appraiser = self._appraiser
        self._shown, self._has_fewest, self._is_decided = [best], True, True
        appraiser.search_goodput([best], range(SEEDS), self._case.rate)
        self._shown += [layout for layout in others if layout != best][: self._wishes.top - 1]
        appraiser.check(self._shown)
        appraiser.search_goodput(self._shown, [0])
        self._shown.sort(key=lambda each: (each != best, not appraiser.carries(each), each.gpus))

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            yield
        except TimeOverError:
            self._stopped = _time_over(self._wishes.budget_s)
        except KeyboardInterrupt:
            if not self._search.best:
                raise
            self._stopped = _INTERRUPTED

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
        gpus = step + (best.gpus if self._has_fewest else self._case.gpus)
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
        appraiser.rate = appraiser.rate or _rounded_down(self._search.carried_rate or self._search.rate)
        # Where the time was over, only the first layout is still worth waiting for.
        known = [layout for layout in shown if layout == shown[0] or appraiser.attainments(layout)]
        layouts = sorted((appraiser.appraised(layout) for layout in known), key=lambda each: not each.carries_rate)
        self._has_fewest |= bool(self._stopped) and not self._wishes.uses_all and layouts[0].carries_rate
        case = replace(self._case, rate=appraiser.rate)
        next_step = None
        if self._next is not None:
            pairs = zip(appraiser.goodputs(self._next), appraiser.goodputs(layouts[0].layout), strict=False)
            gain = Figure.of([after - before for after, before in pairs], least=None)
            next_step = NextStep(min(case.degrees), appraiser.appraised(self._next), gain)
        return GoodputPlan(
            layouts,
            appraiser.rate,
            case.attainment,
            demand_of(case),
            appraiser.variations(layouts[0].layout),
            next_step,
            self._stopped,
            self._trials.made,
            self._has_fewest,
            self._is_decided,
        )


_INTERRUPTED = "it was interrupted"


def _time_over(budget_s: float) -> str:
    return f"the time was over (--budget-s {budget_s:g})"


def _by_gpus(layouts: Iterable[Layout]) -> list[list[Layout]]:
    """Groups of equal GPUs, fewest first."""
    return [list(group) for _, group in groupby(layouts, lambda layout: layout.gpus)]


def _rounded_down(rate: float) -> float:
    """To two significant digits."""
    if rate <= 0:
        return 1.0
    step = 10.0 ** (floor(log10(rate)) - 1)
    return round(floor(rate / step) * step, 12)
