"""The search for layouts: an integer programme proposes them, simulations of the whole cluster decide.

Every layout is judged by the same load, so that differences are differences of the layouts (common random numbers).
Trials are short at first. Layouts that fail end early, and layouts next to good ones join.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from planner.layout.fluid import Costs, costs_of, fewest_gpus, proposals
from planner.layout.layout import Layout
from planner.layout.neighbours import neighbours
from planner.layout.search import PlanCase
from planner.layout.trial import SHORT, Trial, TrialTask
from planner.layout.trials import Trials

_USED = 0.75
"""The share of its fluid rate that a layout is expected to carry, to begin with."""
_WIDE, _NARROW = 1.25, 1.08
"""Factors by which the rate grows while several layouts carry it, and next to the best ones."""
_CENTRES = 2
"""The neighbours of this many of the best layouts are tried."""
_ROUNDS = 4
"""Most rounds of the local search."""
_NEAR = 8
"""Most neighbours of one layout that are tried."""
_GROWTH = 1.15
"""Factor of the GPUs while none carry the rate, but at least one replica more."""


class Search:
    """Looks for layouts of one case.

    Attributes:
        rate: sessions per second at which the layouts were compared last.
        carried_rate: the last rate that a layout carried in a short trial while the most goodput was searched; 0: none.
        best: the layouts so far, best first.
        carrying: layouts that carry the case's rate in short trials, few GPUs first.
    """

    def __init__(self, case: PlanCase, trials: Trials) -> None:
        self.case = case
        self.costs: Costs = costs_of(case)
        self.rate = case.rate
        self.carried_rate = 0.0
        self.best: list[Layout] = []
        self.carrying: list[Layout] = []
        self._trials = trials

    def fewest(self) -> None:
        """Layouts of few GPUs that carry the case's rate, as `carrying`; empty: none was found."""
        least = self._least_gpus(self.case.rate)
        enough = self._enough(self._least_gpus(self.rate / _USED))
        # `enough` carries it, and fewer than `least` cannot.
        while self.carrying and least < enough:
            gpus = (least + enough) // 2
            if self._carry(proposals(self.costs, gpus), gpus):
                enough = min(layout.gpus for layout in self.carrying)
            else:
                least = gpus + 1
        centres: set[Layout] = set()
        while fresh := [layout for layout in self.carrying[:_CENTRES] if layout not in centres]:
            centres.update(fresh)
            gpus = self.carrying[0].gpus
            self._carry([each for layout in fresh for each in self._near(layout, gpus)], gpus)

    def more(self) -> bool:
        """Look for layouts that carry the case's rate with more GPUs than those of `carrying`; False: none is left."""
        self.rate = self.case.rate
        gpus = max((layout.gpus for layout in self.carrying), default=0)
        known = len(self.carrying)
        while gpus < self.case.gpus and len(self.carrying) == known:
            gpus = self._enough(self._grown(gpus))
        return len(self.carrying) > known

    def _least_gpus(self, rate: float) -> int:
        """The fewest GPUs with enough computing time and memory for a rate, by the integer programme; else all."""
        return fewest_gpus(self.costs, self.case.gpus, rate) or self.case.gpus

    def _enough(self, gpus: int) -> int:
        """The first number of GPUs, from this one on, of which a layout carries the rate; the last one, if none."""
        while True:
            found = proposals(self.costs, gpus)
            carry = self._carry(found, gpus)
            if not carry and found:
                carry = self._carry(
                    [each for layout in self.best[:_CENTRES] for each in self._near(layout, gpus)], gpus
                )
            if carry or gpus >= self.case.gpus:
                return gpus
            gpus = self._grown(gpus)

    def _grown(self, gpus: int) -> int:
        return min(max(gpus + min(self.case.degrees), ceil(_GROWTH * gpus)), self.case.gpus)

    def _carry(self, layouts: Sequence[Layout], gpus: int) -> bool:
        """Whether one of the layouts, or a known one within the GPUs, carries the case's rate."""
        fresh = [layout for layout in dict.fromkeys(layouts) if layout not in self.carrying]
        if not self.best:
            self.best = fresh
            self._show()
        carrying = [layout for layout, trial in self._tried(fresh) if trial.carries(self.case.attainment)]
        self._rank(list(dict.fromkeys([*fresh, *self.best])))
        self.carrying += carrying
        # Among equal GPUs the order stays that of the ranking.
        self.carrying.sort(key=lambda layout: (layout.gpus, self.best.index(layout)))
        if self.carrying:
            self.best = [*self.carrying, *(layout for layout in self.best if layout not in self.carrying)]
        self._show()
        return any(layout.gpus <= gpus for layout in self.carrying)

    def most(self) -> None:
        """The most goodput of all GPUs."""
        standing = proposals(self.costs, self.case.gpus)
        self.best = standing
        self._show()
        bounds = [self._bound(layout) for layout in standing[:1]]
        self.rate = _USED * bounds[0] if bounds else 1.0
        standing = self._raised(self._lowered(standing), _WIDE)
        centres: set[Layout] = set()
        for _ in range(_ROUNDS):
            fresh = [layout for layout in self.best[:_CENTRES] if layout not in centres]
            if not fresh:
                return
            centres.update(fresh)
            near = [each for layout in fresh for each in self._near(layout, self.case.gpus)]
            self._tried([layout for layout in dict.fromkeys(near) if self._known(layout) is None])
            self._rank(list(dict.fromkeys([*self.best, *near])))
            self._show()
            carrying = [layout for layout in self.best if self._carries(layout)]
            if carrying:
                self._raised(carrying, _NARROW)

    def _lowered(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts that carry a rate, which is lowered until one does."""
        for _ in range(12):
            carrying = [layout for layout, trial in self._tried(layouts) if trial.carries(self.case.attainment)]
            self._rank(layouts)
            self._show()
            if carrying:
                self.carried_rate = self.rate
                return carrying
            # Only the better half is worth the trials.
            layouts = self.best[: max(ceil(len(self.best) / 2), _CENTRES)]
            self.rate /= _WIDE
        return []

    def _raised(self, carrying: list[Layout], factor: float) -> list[Layout]:
        """The layouts that carry the highest rate, which is raised until none does."""
        # Above what the replicas can compute, a trial is too short to show that the rate is not carried.
        limit = max(self._bound(layout) for layout in carrying or self.best)
        while carrying and self.rate < limit:
            standing = carrying
            self.rate *= factor
            carrying = [layout for layout, trial in self._tried(standing) if trial.carries(self.case.attainment)]
            if carrying:
                self.carried_rate = self.rate
            self._rank(standing)
            self._show()
        return self.best

    def _near(self, layout: Layout, gpus: int) -> list[Layout]:
        """Neighbours within the GPUs, those with the highest fluid rates first."""
        found = neighbours(layout, self.case.degrees, gpus)
        return sorted(found, key=lambda each: -self._bound(each))[:_NEAR]

    def _bound(self, layout: Layout) -> float:
        return self.costs.bound(layout)

    def _tried(self, layouts: Sequence[Layout]) -> list[tuple[Layout, Trial]]:
        tasks = [self._task(layout) for layout in layouts]
        return list(zip(layouts, self._trials.trials(tasks), strict=True))

    def _known(self, layout: Layout) -> Trial | None:
        known: Trial | None = self._trials.known(self._task(layout))
        return known

    def _carries(self, layout: Layout) -> bool:
        trial = self._known(layout)
        return trial is not None and trial.carries(self.case.attainment)

    def _task(self, layout: Layout) -> TrialTask:
        return TrialTask(layout, self.rate, SHORT, self.case.options.seed)

    def _rank(self, layouts: Sequence[Layout]) -> None:
        """Sort by what is known at the present rate: carried, then met rounds."""

        def worth(layout: Layout) -> tuple[bool, float, int]:
            trial = self._known(layout)
            carries = trial is not None and trial.carries(self.case.attainment)
            met = 0.0 if trial is None else trial.met
            return not carries, -met, layout.gpus

        rest = [layout for layout in self.best if layout not in set(layouts)]
        self.best = [*sorted(layouts, key=worth), *rest]

    def _show(self) -> None:
        """Print the best layout so far, and how good it is as far as known."""
        if not self.best:
            return
        best = self.best[0]
        trial = self._known(best)
        if trial is None:
            known = "proposed by the integer programme"
        elif trial.carries(self.case.attainment):
            known = f"carries {self.rate:.3g} sessions/s in a short trial"
        else:
            known = f"attains {trial.met:.0%} of the rounds at {self.rate:.3g} sessions/s in a short trial"
        self._trials.show(f"{best}, {known}")
