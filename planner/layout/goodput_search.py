"""The search for layouts: an integer programme proposes them, simulations of the whole cluster decide.

Every layout is judged by the same load, so that differences are differences of the layouts (common random numbers).
Trials are short at first. The trial of a layout that fails ends early. Neighbours of good layouts are tried too. If a
layout failed, layouts that are a part of it are not tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from math import ceil
from typing import Any

from ampd.reports.figures import format_number
from ampd.types import Role
from planner.layout.agenda import Steps
from planner.layout.appraisal import SEEDS, carried_on_average, may_be_carried
from planner.layout.case import PlanCase
from planner.layout.costs import Costs, costs_of
from planner.layout.feedback import corrected, surprising
from planner.layout.fluid import fewest_gpus, most_rate, proposals
from planner.layout.layout import Layout
from planner.layout.neighbours import grown, is_part, neighbours, scaled
from planner.layout.trial import DECIDES, LONG, SHORT, Trial, TrialTask
from planner.layout.trials import Trials

_CONFIRMS: dict[str, Any] = {"horizon": LONG, "margin": DECIDES, "keeps_result": True}
"""Settings of the long trial that a layout gets after it carried the rate in a short one. A plan's figures begin with
the same trial."""
_LONG_BATCH = 2
_CLOSE = 0.03
"""A long trial that misses the wanted shares by at most this much says little, because a few bursts decide it. Then
further seeds decide."""
_ABOVE_BOUND = 1.25
"""A layout may carry this much more than its fluid rate, because passes and larger batches save time."""
_RESERVE = 1.25
"""A layout that no trial has confirmed is expected to carry this many times the rate."""
_UNIT_GPUS = 8
_UNIT_RESERVE = 1.1
_UNITS = 2
"""Clusters of at least this many units begin with a trial of one unit, which takes little time."""
_LEAST_SHARE = 0.2
"""A unit is tried at this share of the expected rate at least."""
_BATCH = 4
"""Layouts that are tried at a time. If one of them carries the rate, no further ones are tried."""
_WIDE, _NARROW = 1.25, 1.08
"""Factors by which the rate grows: while several layouts carry it, and for the neighbours of the best ones."""
_CENTRES, _MOST_CENTRES = 2, 4
"""The neighbours of this many of the best layouts are tried, for the fewest GPUs and for the most goodput."""
_CENTRES_OF_ROLES = 2
"""For the most goodput, the neighbours of this many of the best layouts with the same roles are tried too. One good
proposal may otherwise fill the centres with its own neighbours, all co-located for example."""
_ROUNDS = 3
"""Most rounds of the local search."""
_NEAR = 6
_MOST_NEAR = 10
"""Most neighbours of one layout that are tried, for the fewest GPUs and for the most goodput."""
_GROWTH = 1.15
"""Factor of the GPUs while none carry the rate, but at least one replica more."""


def centres_of(ranked: Sequence[Layout]) -> list[Layout]:
    """The layouts whose neighbours are tried: the best ones of all, and the best ones of each set of roles.

    Args:
        ranked: the best first.
    """
    of_roles: defaultdict[frozenset[Role], list[Layout]] = defaultdict(list)
    for layout in ranked:
        of_roles[frozenset(layout.groups)].append(layout)
    best = [ranked[:_MOST_CENTRES], *(layouts[:_CENTRES_OF_ROLES] for layouts in of_roles.values())]
    return list(dict.fromkeys(chain.from_iterable(best)))


class Search:
    """Looks for layouts of one case.

    Attributes:
        rate: sessions per second at which the layouts were compared last.
        carried_rate: the last rate that a layout carried in a short trial while the most goodput was searched; 0: none.
        carried_by: the layout that did.
        best: the layouts so far, best first.
        none_carries: `more` found no further layout that carries the case's rate.
        carrying: layouts that carry the case's rate in a long trial, or on average over some where the first one says
            little. Those with the fewest GPUs come first.
        failed: layouts that do not carry it.
    """

    def __init__(self, case: PlanCase, trials: Trials) -> None:
        self.case = case
        self.costs: Costs = costs_of(case)
        self.expected: Costs = self.costs.with_queues()
        self.rate = case.rate
        self.carried_rate = 0.0
        self.carried_by: Layout | None = None
        self.best: list[Layout] = []
        self.none_carries = False
        self.carrying: list[Layout] = []
        self._trials = trials
        self.failed: list[Layout] = []
        self._close: list[Layout] = []
        """Of the failed ones, those that missed the rate by little."""
        self._scaled_up: Layout | None = None
        self._most_carried: dict[Layout, float] = {}
        """The highest rates that layouts carried in short trials."""

    def fewest(self) -> None:
        """Layouts of few GPUs that carry the case's rate, as `carrying`; empty: none was found."""
        self.best = [self.estimated()]
        self._show()
        self._scale_up()
        # Only what cannot be computed is ruled out. Whether KV memory suffices is decided by trials.
        bare = self.costs.without_memory()
        least = fewest_gpus(bare, self.case.gpus, self.case.rate / _ABOVE_BOUND) or self.case.gpus
        first = fewest_gpus(self.expected, self.case.gpus, self.case.rate) or self.case.gpus
        enough = self._enough(min([first, *(layout.gpus for layout in self.carrying)]))
        # `enough` carries it, and fewer than `least` cannot.
        while self.carrying and least < enough:
            gpus = (least + enough) // 2
            if self._carry(self._proposed(gpus), gpus) or self._carry(self._near_close(gpus), gpus):
                enough = min(layout.gpus for layout in self.carrying)
            else:
                least = gpus + 1
        # Layouts next to the smallest ones may do with even fewer.
        for _ in range(_ROUNDS):
            if not self.carrying:
                return
            gpus = self.carrying[0].gpus - 1
            near = [each for layout in self.carrying[:_CENTRES] for each in self._near(layout, gpus)]
            if not self._carry(near, gpus):
                return

    def estimated(self) -> Layout:
        """A layout with a reserve. No trial has shown yet that it carries the rate."""
        if self._scaled_up is not None:
            return self._scaled_up
        gpus = fewest_gpus(self.expected, self.case.gpus, _RESERVE * self.case.rate) or self.case.gpus
        found = most_rate(self.expected, gpus)
        return found[0] if found else Layout((), ((min(self.case.degrees), 1),))

    def enlarged(self, layout: Layout) -> Layout | None:
        """A layout with as much more of everything as the reserve; None: there are too few GPUs for it."""
        larger = grown(layout, _RESERVE)
        return larger if larger.gpus <= self.case.gpus else None

    def _scale_up(self) -> None:
        """Try several copies of a small layout as one layout, if the small one carries its share of the rate."""
        unit_gpus = max(_UNIT_GPUS, *self.case.degrees)
        if self.best[0].gpus < _UNITS * unit_gpus:
            return
        found = most_rate(self.expected, unit_gpus)
        if found is None:
            return
        unit, self.rate = found
        carries = False
        while not carries and self.rate > _LEAST_SHARE * found[1]:
            carries = self._tried([unit])[0][1].carries(self.case.attainment)
            self.rate /= 1.0 if carries else _WIDE
        larger = scaled(unit, ceil(_UNIT_RESERVE * self.case.rate / self.rate))
        self.rate = self.case.rate
        if carries and larger.gpus <= self.case.gpus:
            self._scaled_up = larger
            self._carry([larger], larger.gpus)

    def more(self) -> bool:
        """Look for layouts that carry the case's rate with more GPUs than those of `carrying`; False: none is left."""
        self.rate = self.case.rate
        gpus = max((layout.gpus for layout in self.carrying), default=0)
        known = len(self.carrying)
        while gpus < self.case.gpus and len(self.carrying) == known:
            gpus = self._enough(self._grown(gpus))
        self.none_carries = len(self.carrying) == known
        return not self.none_carries

    def beside(self, layouts: Sequence[Layout]) -> None:
        """Try other layouts of as many GPUs, because these carry the rate only with the seed of the search."""
        self.rate, gpus = self.case.rate, layouts[0].gpus
        near = [each for layout in layouts[:_CENTRES] for each in self._near(layout, gpus, _MOST_NEAR)]
        others = [each for each in [*self._proposed(gpus), *near] if each.gpus == gpus and self._may_carry(each)]
        self._try(self._fresh(others)[:_BATCH])

    def _enough(self, gpus: int) -> int:
        """The fewest GPUs, from this number on, with a layout that carries the rate; all GPUs, if none does."""
        while True:
            found = self._proposed(gpus)
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

    def _proposed(self, gpus: int) -> list[Layout]:
        """The proposals whose replicas could compute the rate. Those that are expected to carry most come first.

        The expected costs are corrected by the trials until now. Queues cost less than expected where many small
        replicas share them. So every other one is proposed without.
        """
        shown = surprising(self.expected, self.case.rate, self.carrying, self.failed)
        ranked = (
            sorted(proposals(costs, gpus), key=lambda layout: -costs.bound(layout))
            for costs in (corrected(self.expected, shown), self.costs)
        )
        found = dict.fromkeys(chain.from_iterable(zip_longest(*ranked)))
        return [layout for layout in found if layout is not None and self._may_carry(layout)]

    def _near_close(self, gpus: int) -> list[Layout]:
        """Neighbours of the layouts within the GPUs that missed the rate by little."""
        close = [layout for layout in self._close if layout.gpus <= gpus]
        near = [each for layout in close[-_CENTRES:] for each in self._near(layout, gpus)]
        return [layout for layout in near if self._may_carry(layout)]

    def _carry(self, layouts: Sequence[Layout], gpus: int) -> bool:
        """Whether one of the layouts, or a known one within the GPUs, carries the case's rate."""
        fresh = self._fresh(layouts)
        for start in range(0, len(fresh), _BATCH):
            self._try(fresh[start : start + _BATCH])
            if any(layout.gpus <= gpus for layout in self.carrying):
                break
        return any(layout.gpus <= gpus for layout in self.carrying)

    def _fresh(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts of which no trial has shown yet whether they carry the case's rate."""
        return [
            layout
            for layout in dict.fromkeys(layouts)
            if layout not in self.carrying and not any(is_part(layout, failed) for failed in self.failed)
        ]

    def _try(self, layouts: Sequence[Layout]) -> None:
        """Add layouts that carry the case's rate to `carrying`: short trials of all, then long ones of the best."""
        passed: list[Layout] = []
        for layout, trial in self._tried(layouts):
            (passed if trial.carries(self.case.attainment) else self.failed).append(layout)
        self._rank(list(dict.fromkeys([*layouts, *self.best])))
        passed.sort(key=self.best.index)
        for start in range(0, len(passed), _LONG_BATCH):
            pair = passed[start : start + _LONG_BATCH]
            verdicts: dict[Layout, bool] = {}
            self._trials.together(self._confirmation(layout, verdicts) for layout in pair)
            carrying = [layout for layout in pair if verdicts.get(layout)]
            self._close += [layout for layout in pair if verdicts.get(layout) is False]
            self.failed += [layout for layout in pair if layout not in carrying]
            self.carrying += carrying
            if carrying:
                break
        # Among equal GPUs the order stays that of the ranking.
        self.carrying.sort(key=lambda layout: (layout.gpus, self.best.index(layout)))
        if self.carrying:
            self.best = [*self.carrying, *(layout for layout in self.best if layout not in self.carrying)]
        self._show()

    def _confirmation(self, layout: Layout, verdicts: dict[Layout, bool]) -> Steps:
        """The long trials that show whether a layout carries the rate: one, and those of further seeds if it is close.

        Adds to `verdicts`: True if it carries the rate, False if it misses it by little. Else it adds nothing.
        """
        level, task = self.case.attainment, replace(self._task(layout), **_CONFIRMS)
        yield [task]
        trials = self._made([task])
        if trials[0].carries(level):
            verdicts[layout] = True
        elif trials[0].is_whole and trials[0].reserve(level) >= -_CLOSE:
            while len(trials) < SEEDS and may_be_carried(trials, level, SEEDS):
                further = replace(task, seed=task.seed + len(trials), margin=None, keeps_result=False)
                yield [further]
                trials += self._made([further])
            verdicts[layout] = len(trials) == SEEDS and carried_on_average(trials, level)

    def _made(self, tasks: Sequence[TrialTask]) -> list[Trial]:
        """Trials that were made."""
        known = [self._trials.known(task) for task in tasks]
        return [trial for trial in known if trial is not None]

    def most(self) -> None:
        """The most goodput of all GPUs."""
        found = [*proposals(self.expected, self.case.gpus), *proposals(self.costs, self.case.gpus)]
        standing = list(dict.fromkeys(found))
        self.best = standing
        self._show()
        self.rate = max((self.expected.bound(layout) for layout in standing), default=1.0)
        self._raised(self._lowered(standing), _WIDE)
        if self.carried_rate:
            # Layouts are told apart best at a rate that is only a little too high.
            self.rate = self.carried_rate
            self._raised([layout for layout in self.best if self._carries(layout)], _NARROW)
        self._feed_back()
        centres: set[Layout] = set()
        for _ in range(_ROUNDS):
            fresh = [layout for layout in centres_of(self.best) if layout not in centres]
            if not fresh:
                return
            centres.update(fresh)
            near = [each for layout in fresh for each in self._near(layout, self.case.gpus, _MOST_NEAR)]
            self._tried([layout for layout in dict.fromkeys(near) if self._known(layout) is None])
            self._rank(list(dict.fromkeys([*self.best, *near])))
            self._show()
            carrying = [layout for layout in self.best if self._carries(layout)]
            if carrying:
                self._raised(carrying, _NARROW)

    def _feed_back(self) -> None:
        """Try what the programme proposes with costs that fit to the rates that layouts carried."""
        proposed = proposals(corrected(self.expected, self._most_carried), self.case.gpus)
        fresh = [layout for layout in proposed if layout not in self.best]
        carrying = [layout for layout, trial in self._tried(fresh) if trial.carries(self.case.attainment)]
        self._rank(list(dict.fromkeys([*self.best, *fresh])))
        if carrying:
            self._raised(carrying, _NARROW)

    def _lowered(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts that carry a rate, which is lowered until one does."""
        for _ in range(12):
            carrying = [layout for layout, trial in self._tried(layouts) if trial.carries(self.case.attainment)]
            self._rank(layouts)
            self._show()
            if carrying:
                self.carried_rate, self.carried_by = self.rate, self.best[0]
                return carrying
            # Only the better half is worth the trials.
            layouts = self.best[: max(ceil(len(self.best) / 2), _CENTRES)]
            self.rate /= _WIDE
        return []

    def _raised(self, carrying: list[Layout], factor: float) -> list[Layout]:
        """The layouts that carry the highest rate, which is raised until none does."""
        # Far above what the replicas can compute, a trial is too short to show that the rate is not carried.
        limit = _ABOVE_BOUND * max(self._bound(layout) for layout in carrying or self.best)
        while carrying and self.rate < limit:
            standing = carrying
            self.rate *= factor
            carrying = [layout for layout, trial in self._tried(standing) if trial.carries(self.case.attainment)]
            self._rank(standing)
            if carrying:
                self.carried_rate, self.carried_by = self.rate, self.best[0]
            self._show()
        return self.best

    def _near(self, layout: Layout, gpus: int, most: int = _NEAR) -> list[Layout]:
        """Neighbours within the GPUs. Those that are expected to carry most come first."""
        found = neighbours(layout, self.case.degrees, gpus)
        return sorted(found, key=lambda each: -self.expected.bound(each))[:most]

    def _bound(self, layout: Layout) -> float:
        return self.costs.bound(layout)

    def _may_carry(self, layout: Layout) -> bool:
        return _ABOVE_BOUND * self._bound(layout) >= self.case.rate

    def _tried(self, layouts: Sequence[Layout]) -> list[tuple[Layout, Trial]]:
        tasks = [self._task(layout) for layout in layouts]
        tried = list(zip(layouts, self._trials.trials(tasks), strict=True))
        for layout, trial in tried:
            if trial.carries(self.case.attainment):
                self._most_carried[layout] = max(self._most_carried.get(layout, 0.0), self.rate)
        return tried

    def _known(self, layout: Layout) -> Trial | None:
        known: Trial | None = self._trials.known(self._task(layout))
        return known

    def _carries(self, layout: Layout) -> bool:
        trial = self._known(layout)
        return trial is not None and trial.carries(self.case.attainment)

    def _task(self, layout: Layout) -> TrialTask:
        return TrialTask(layout, self.rate, SHORT, self.case.options.seed)

    def _rank(self, layouts: Sequence[Layout]) -> None:
        """Sort by what is known at the present rate."""

        def worth(layout: Layout) -> tuple[bool, tuple[int, float], int]:
            trial = self._known(layout)
            rank = (0, 0.0) if trial is None else trial.rank(self.case.attainment)
            return trial is None, rank, layout.gpus

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
        elif best in self.carrying and self.rate == self.case.rate:
            known = f"carries {format_number(self.rate)} sessions/s in a long trial"
        elif trial.carries(self.case.attainment):
            known = f"carries {format_number(self.rate)} sessions/s in a short trial"
        else:
            known = f"attains {trial.met:.0%} of the rounds at {format_number(self.rate)} sessions/s in a short trial"
        self._trials.show(f"{best}, {known}")
