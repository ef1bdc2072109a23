"""Large clusters: the plan of a part becomes one of the whole, which is simulated as far as time allows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from planner.layout.appraisal import SEEDS, Appraised, Figure, carried_on_average
from planner.layout.case import PlanCase
from planner.layout.copies import copies_between, in_proportion
from planner.layout.costs import costs_of
from planner.layout.demand import demand_of
from planner.layout.fluid import fewest_gpus
from planner.layout.layout import Layout
from planner.layout.neighbours import filled, grown
from planner.layout.plan import INTERRUPTED, GoodputPlan, NextStep, Wishes, time_over
from planner.layout.trial import ONCE, TimeOverError, Trial, TrialTask
from planner.layout.trials import Trials

MOST_GPUS = 24
"""Layouts are tried for a part of a cluster that needs more GPUs than these."""
_STEP, _TRIES = 1.06, 3
"""A cluster that does not carry the rate as a whole grows by this factor, and at most this many times."""
_LOWER, _LOWERINGS = 1.1, 8
"""Where it cannot grow, the rate is lowered by this factor until it is carried, and at most this many times."""
_WORSE = 0.01
"""A layout of more GPUs that attains this much less is not taken."""


def scale_of(case: PlanCase, *, uses_all: bool) -> int:
    """The part of a cluster that layouts are tried for, as its denominator."""
    if not uses_all:
        gpus = fewest_gpus(costs_of(case).with_queues(), case.gpus, case.rate) or case.gpus
        return max(ceil(gpus / MOST_GPUS), 1)
    if case.gpus <= MOST_GPUS:
        return 1
    largest = max(case.degrees)

    def left(size: int) -> int:
        """GPUs that remain if only replicas of the largest degree are used."""
        return case.gpus - case.gpus // size * (size // largest * largest)

    sizes = range(max(MOST_GPUS // 2, largest), max(MOST_GPUS, largest) + 1)
    return case.gpus // min(sizes, key=lambda size: (left(size), -size))


def whole_plan(case: PlanCase, part: GoodputPlan, scale: int, wishes: Wishes, end_s: float) -> GoodputPlan:
    """The plan of a part of the cluster for the whole one, whose first layout is simulated with several seeds.

    `end_s`: monotonic time at which these simulations are given up. Ctrl-C ends them too. Without any the figures are
    those of the part, times `scale`.
    """
    rate = part.rate * scale
    demand = demand_of(replace(case, rate=rate))
    whole = _copied(replace(part, rate=rate, demand=demand, scale=scale, fuller=None, tied=()), part, Fraction(scale))
    with Trials(replace(case, rate=rate), wishes.jobs, max(end_s - time.monotonic(), 0.0)) as trials:
        check = _Check(case, whole, part, trials)
        try:
            return check.filled() if wishes.uses_all else check.enlarged()
        except (TimeOverError, KeyboardInterrupt) as end:
            is_interrupted = isinstance(end, KeyboardInterrupt)
            return check.unchecked(part.stopped or (INTERRUPTED if is_interrupted else time_over(wishes.budget_s)))


class _Check:
    """The simulations of one whole cluster. `plan`: of as many copies of the part as its scale."""

    def __init__(self, case: PlanCase, plan: GoodputPlan, part: GoodputPlan, trials: Trials) -> None:
        self._case, self._plan, self._part, self._trials = case, plan, part, trials
        self._best = plan.layouts[0]
        self._layout = self._best.layout
        self._enlarged = 0

    def filled(self) -> GoodputPlan:
        """The plan with replicas on the GPUs that the parts left, unless simulations show that it attains less."""
        bound = costs_of(self._case).with_queues().bound
        scaled_up = self._layout
        known = self._attained(scaled_up)
        full = filled(scaled_up, self._case.degrees, self._case.gpus, bound)
        if full == scaled_up:
            return self._found(scaled_up, known)
        more = self._attained(full)
        met, more_met = (Figure.of([trial.met for trial in each], 1.0) for each in (known, more))
        if more_met.mean < met.mean - _WORSE:
            fuller = full, f"attains {more_met.mean:.1%} of the rounds, and this one {met.mean:.1%}"
            return replace(self._found(scaled_up, known), fuller=fuller)
        return replace(self._found(full, more), filled_gpus=full.gpus - scaled_up.gpus)

    def enlarged(self) -> GoodputPlan:
        """The plan with the fewest copies of the part that carry the rate, or a layout that grows until it does."""
        if (fewer := self._fewer_copies()) is not None:
            return fewer
        known = self._attained(self._layout)
        while not self._carry(known) and self._enlarged + 1 < _TRIES and self._best.carries_rate:
            larger = grown(self._layout, _STEP)
            if larger.gpus > self._case.gpus:
                break
            self._layout = larger
            self._enlarged += 1
            known = self._attained(larger)
        return self._found(self._layout, known)

    def unchecked(self, stopped: str) -> GoodputPlan:
        """The plan without a simulation of the whole."""
        best = replace(self._best, layout=self._layout)
        # Variations of a part are simulated for as few copies as should do.
        variations = [] if self._able_copies() else self._plan.variations
        return replace(
            self._plan,
            layouts=[best],
            variations=variations,
            stopped=stopped,
            is_checked=False,
            enlarged=self._enlarged,
        )

    def _able_copies(self) -> list[Fraction]:
        """Fewer copies of the part than its scale that should carry the rate, as the part carries more than its share.

        The fewest come first.
        """
        best = self._part.layouts[0]
        if not self._part.has_fewest_gpus or best.goodput is None or best.goodput.mean <= self._part.rate:
            return []
        return copies_between(best.layout, self._plan.rate / best.goodput.mean, self._plan.scale)[:-1]

    def _fewer_copies(self) -> GoodputPlan | None:
        """The plan with the fewest copies that carry the rate in simulations of the whole; None: all are needed."""
        able = self._able_copies()
        found: tuple[Fraction, list[Trial]] | None = None
        # The fewest first, because the part says that they suffice. If they do not, the number is searched by halving.
        low, high, number = 0, len(able), 0
        while low < high:
            known = self._attained(in_proportion(self._part.layouts[0].layout, able[number]))
            if self._carry(known):
                found, high = (able[number], known), number
            else:
                low = number + 1
            number = (low + high) // 2
        if found is None:
            if able:
                self._plan = replace(self._plan, variations=[])
            return None
        copies, known = found
        variations = self._plan.variations if copies == able[0] else []
        self._plan = _copied(replace(self._plan, variations=variations), self._part, copies)
        self._best = self._plan.layouts[0]
        self._layout = self._best.layout
        return self._found(self._layout, known)

    def _attained(self, layout: Layout) -> list[Trial]:
        """Trials at the plan's rate, one per seed: as many as the time allows, at least one."""
        tasks = [self._task(layout, self._plan.rate, seed) for seed in range(SEEDS)]
        try:
            return self._trials.trials(tasks)
        except TimeOverError:
            known = [trial for task in tasks if (trial := self._trials.known(task)) is not None]
            if not known or known[0].result is None:
                raise
            return known

    def _found(self, layout: Layout, known: Sequence[Trial]) -> GoodputPlan:
        rate, part = self._plan.rate, self._best
        carries = self._carry(known)
        assert known[0].result is not None
        # Of a layout with more replicas than the parts, no other rate is known.
        curve = {rate: known[0]} if layout.gpus > part.layout.gpus else dict(part.curve) | {rate: known[0]}
        figure, is_least = part.goodput, part.goodput_is_least or layout.gpus > part.layout.gpus
        if carries and self._enlarged:
            figure, is_least = Figure(rate, None, None, len(known)), True
        elif carries and figure is not None and is_least:
            figure = Figure(figure.mean, None, None, figure.seeds)
        elif not carries:
            curve = {rate: known[0]}
            figure, is_least = self._lowered(layout, curve), False
        appraised = Appraised(
            layout,
            Figure.of([trial.met for trial in known], 1.0),
            carries,
            figure,
            sorted(curve.items(), key=lambda item: item[0]),
            known[0].result,
            is_least and figure is not None,
        )
        keeps_step = carries and not is_least
        return replace(
            self._plan,
            layouts=[appraised],
            enlarged=self._enlarged,
            next_step=self._plan.next_step if keeps_step else None,
            trials=self._plan.trials + self._trials.made,
        )

    def _lowered(self, layout: Layout, curve: dict[float, Trial]) -> Figure | None:
        """The first lower rate that the layout carries, for one seed; None: it is not known. Adds to the curve."""
        known = self._best.goodput
        rate = self._plan.rate
        if known is not None and 0 < known.mean < rate:
            rate = known.mean * _LOWER
        for _ in range(_LOWERINGS):
            rate /= _LOWER
            try:
                (trial,) = self._trials.trials([self._task(layout, rate, 0)])
            except TimeOverError:
                return None
            curve[rate] = trial
            if trial.carries(self._case.attainment):
                return Figure(rate, None, None, 1)
        return None

    def _carry(self, trials: Sequence[Trial]) -> bool:
        return carried_on_average(trials, self._case.attainment)

    def _task(self, layout: Layout, rate: float, seed: int) -> TrialTask:
        return TrialTask(layout, rate, ONCE, self._case.options.seed + seed, margin=None, keeps_result=not seed)


def _copied(plan: GoodputPlan, part: GoodputPlan, copies: Fraction) -> GoodputPlan:
    """The plan with `copies` times the part's layout."""
    best, step = _times(part.layouts[0], copies), part.next_step
    if step is not None:
        larger = _times(step.best, copies)
        step = NextStep(larger.layout.gpus - best.layout.gpus, larger, step.gain.times(float(copies)))
    return replace(plan, layouts=[best], next_step=step, copies=float(copies))


def _times(part: Appraised, copies: Fraction) -> Appraised:
    """A layout of `copies` times as many replicas, with the figures of the part at as many times its rates."""
    factor = float(copies)
    return replace(
        part,
        layout=in_proportion(part.layout, copies),
        goodput=part.goodput and part.goodput.times(factor),
        curve=[(rate * factor, trial) for rate, trial in part.curve],
    )
