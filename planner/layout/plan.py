"""The plan: the layouts that simulations found best.

The best layout is the one with the fewest GPUs that carries the rate. With `--use-all` it is the layout of all GPUs
that carries most. That layout is also shown if no layout carries the rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from planner.layout.candidate import CHOOSING, HELD_OUT, Candidate
from planner.layout.fluid import costs_of, fewest_gpus
from planner.layout.layout import PlanCase
from planner.layout.search import Search, filled, scaled
from planner.layout.trial import BUDGET_S, ONCE, TimeOverError, Trials, TrialTask

MORE_LOAD = 1.2
"""The best layout is simulated at this many times the plan's rate too."""
_MOST_GPUS = 24
"""Layouts are tried for a part of a cluster that needs more GPUs than these."""
_PART_SHARE = 0.8
"""Of the budget, for the part. The rest is for the simulation of the whole."""
_ROUNDINGS = 3
"""Most tries to find a round rate below the goodput that is carried too."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Layouts with their trials.

    Attributes:
        layouts: best first; empty: no layout carries any rate.
        rate: sessions per second at which they were simulated.
        has_fewest_gpus: the first layout is the smallest that carries the rate. Else it carries the most.
        trials: how many simulations were made.
        stopped: why the simulations ended early; empty: they did not.
        scale: the layouts are this many times one that was planned for such a part of the GPUs and of the rate.
        tried: all layouts of which a trial was made, of such a part.
    """

    layouts: list[Candidate]
    rate: float
    has_fewest_gpus: bool
    trials: int
    stopped: str = ""
    scale: int = 1
    tried: Sequence[Candidate] = ()

    @property
    def carries(self) -> bool:
        """Whether the best layout carries the rate."""
        return bool(self.layouts) and self.layouts[0].carries(self.rate)


def make_plan(case: PlanCase, wishes: Wishes) -> Plan:
    """Plan. When the time is over, and after Ctrl-C, the plan has what was found until then."""
    end_s = time.monotonic() + wishes.budget_s
    scale = scale_of(case, uses_all=wishes.uses_all)
    part = replace(case, gpus=case.gpus // scale, rate=case.rate / scale)
    if scale > 1:
        print(f"searching layouts for 1/{scale} of the {case.gpus} GPUs", file=sys.stderr)
    with Trials(part, wishes.jobs, wishes.budget_s * (_PART_SHARE if scale > 1 else 1.0)) as trials:
        plan = _Planner(part, wishes, trials).plan()
    if scale == 1 or not plan.layouts:
        return plan
    with Trials(case, wishes.jobs, end_s - time.monotonic()) as trials:
        return whole_plan(case, plan, scale, trials)


def scale_of(case: PlanCase, *, uses_all: bool) -> int:
    """The part of a cluster that layouts are tried for, as its denominator."""
    gpus = case.gpus
    if not uses_all:
        gpus = fewest_gpus(costs_of(case).with_queues(), gpus, case.rate) or gpus
    return max(ceil(gpus / _MOST_GPUS), 1)


def whole_plan(case: PlanCase, part: Plan, scale: int, trials: Trials) -> Plan:
    """The plan of a part, multiplied. The best layout is simulated once as a whole."""
    rate = part.rate * scale
    layouts = [each.times(scaled(each.layout, scale), scale) for each in part.layouts]
    best = layouts[0]
    if not part.has_fewest_gpus:
        # The part may leave GPUs, which get further replicas of the same roles.
        best.layout = filled(best.layout, case.degrees, case.gpus, costs_of(case).with_queues().bound)
    stopped = part.stopped
    if stopped != INTERRUPTED:
        try:
            task = TrialTask(best.layout, rate, ONCE, case.options.seed, None, keeps_result=True)
            ((_, best.whole),) = trials.run([task])
        except TimeOverError:
            stopped = stopped or TIME_OVER
        except KeyboardInterrupt:
            stopped = INTERRUPTED
    made = part.trials + trials.made
    return replace(part, layouts=layouts, rate=rate, trials=made, stopped=stopped, scale=scale)


INTERRUPTED = "it was interrupted"
TIME_OVER = "the time was over (--budget-s)"


class _Planner:
    """One plan in the making."""

    def __init__(self, case: PlanCase, wishes: Wishes, trials: Trials) -> None:
        self._case, self._wishes, self._trials = case, wishes, trials
        self._search = Search(case, trials)
        self._has_fewest = False
        self._rate = case.rate

    def plan(self) -> Plan:
        stopped = ""
        try:
            self._choose()
            if self._search.best[0].most:
                self._add_figures()
        except TimeOverError:
            stopped = TIME_OVER
        except KeyboardInterrupt:
            if not self._search.best:
                raise
            stopped = INTERRUPTED
        tried = list(self._search.candidates.values())
        return Plan(self._shown(), self._rate, self._has_fewest, self._trials.made, stopped, tried=tried)

    def _choose(self) -> None:
        """Find the layouts to show, and the goodput of the best one. Held-out seeds tell that of the fewest GPUs."""
        search = self._search
        self._has_fewest = not self._wishes.uses_all and search.fewest()
        if not self._has_fewest:
            search.most()
        search.best = search.best[: self._wishes.top]
        best = search.best[0]
        start = self._rate if self._has_fewest else best.most
        if start:
            seeds = HELD_OUT if self._has_fewest else CHOOSING
            search.search_goodputs([best], seeds, start, with_interval=True)

    def _add_figures(self) -> None:
        """Simulate the best layout at the plan's rate and with more load, and then the others."""
        search, (best, *others) = self._search, self._search.best
        if not self._rate:
            self._choose_rate(best)
        search.try_at([best], self._rate, best.seeds, for_figures=True)
        search.try_at([best], MORE_LOAD * self._rate, best.seeds, for_figures=True)
        seeds = CHOOSING[:1] if self._has_fewest else CHOOSING
        search.search_goodputs(others, seeds, self._rate, with_interval=True)
        search.try_at(others, self._rate, seeds, for_figures=True)

    def _choose_rate(self, best: Candidate) -> None:
        """Take a round rate that the best layout carries as the plan's rate."""
        for _ in range(_ROUNDINGS):
            self._rate = _rounded_down(best.most)
            self._search.try_at([best], self._rate, best.seeds, for_figures=True)
            # The rate may fail, although a higher one was carried. Then the goodput is lower.
            if not best.most or best.most >= self._rate:
                return

    def _shown(self) -> list[Candidate]:
        """The layouts with their figures. If the time was over before the best one had any, it gets a simulation.

        A layout that attains no round is none.
        """
        best, *others = self._search.best[: self._wishes.top]
        if best.seeds and not best.most:
            return []
        self._rate = self._rate or _rounded_down(best.most or self._search.expected_rate(best.layout))
        if not _has_result(best, self._rate):
            task = replace(self._search.short_task(best), rate=self._rate, margin=None, keeps_result=True)
            best.first = self._trials.make(task)
        shown = [best, *(each for each in others if _has_result(each, self._rate))]
        return [each for each in shown if each.attainment(self._rate).mean]


def _has_result(candidate: Candidate, rate: float) -> bool:
    trials = candidate.at(rate)
    return bool(trials) and trials[0].result is not None


def _rounded_down(rate: float) -> float:
    """A positive rate to two significant digits."""
    step = 10.0 ** (floor(log10(rate)) - 1)
    return round(floor(rate / step) * step, 12)
