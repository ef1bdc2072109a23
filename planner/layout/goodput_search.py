"""The search for the most goodput: an integer programme proposes layouts, simulations of the cluster decide.

Every layout is judged by the same load, so that differences are differences of the layouts (common random numbers).
Trials are short at first. Layouts that fail end early, and layouts next to good ones join.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from planner.layout.fluid import Costs, costs_of, proposals
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


class Search:
    """Looks for layouts of one case.

    Attributes:
        rate: sessions per second at which the layouts were compared last.
        best: the layouts so far, best first.
    """

    def __init__(self, case: PlanCase, trials: Trials) -> None:
        self.case = case
        self.costs: Costs = costs_of(case)
        self.rate = 0.0
        self.best: list[Layout] = []
        self._trials = trials

    def most(self) -> None:
        """The most goodput of all GPUs."""
        standing = proposals(self.costs, self.case.gpus)
        self.best = standing
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
            carrying = [layout for layout in self.best if self._carries(layout)]
            if carrying:
                self._raised(carrying, _NARROW)

    def _lowered(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts that carry a rate, which is lowered until one does."""
        for _ in range(12):
            carrying = [layout for layout, trial in self._tried(layouts) if trial.carries(self.case.attainment)]
            self._rank(layouts)
            if carrying:
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
            self._rank(standing)
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
        self._trials.show(str(self.best[0]))
