"""Large clusters: the plan of a part becomes one of the whole, which is simulated as far as time allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf
from statistics import fmean
from typing import NamedTuple

from planner.layout.appraisal import SEEDS, Appraised, Figure, carried_on_average
from planner.layout.case import PlanCase
from planner.layout.copies import copies_between, in_proportion
from planner.layout.costs import costs_of
from planner.layout.demand import demand_of
from planner.layout.fluid import fewest_gpus
from planner.layout.layout import Layout
from planner.layout.neighbours import filled, is_part
from planner.layout.plan import INTERRUPTED, GoodputPlan, NextStep, Wishes, by_goodput, time_over
from planner.layout.trial import ONCE, TimeOverError, Trial, TrialTask
from planner.layout.trials import Trials

MOST_GPUS = 24
"""Layouts are tried for a part of a cluster that needs more GPUs than these."""
_MORE = 1.15
"""Up to this many times the copies that should carry the rate, or that the scale says, are tried."""
_LOWER, _LOWERINGS = 1.1, 8
"""Where no more copies are possible, the rate is lowered by this factor until it is carried, at most so many times."""
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


def whole_plan(
    case: PlanCase, part: GoodputPlan, scale: int, wishes: Wishes, trials: Trials, *, is_again: bool = False
) -> GoodputPlan:
    """The plan of a part of the cluster for the whole one.

    The first layout is simulated with several seeds, then each alternative with one. After Ctrl-C in the search of the
    part the first one is simulated with one seed, and there are no alternatives. Without any simulation of the
    first one the figures are those of the part, times `scale`, and it has no alternatives.

    Args:
        trials: of the whole cluster. The end of their time and Ctrl-C end these simulations. What they showed until
            then is kept: a layout that failed is not shown with the figures of its part.
        is_again: the part has more figures now. After Ctrl-C nothing is simulated again.
    """
    rate = part.rate * scale
    plan = replace(part, rate=rate, demand=demand_of(replace(case, rate=rate)), scale=scale, fuller=None, tied=())
    check = _Check(case, plan, part, trials, wishes)
    if part.stopped == INTERRUPTED and is_again:
        check.stop(INTERRUPTED)
    elif part.stopped == INTERRUPTED:
        print(f"simulating the best layout once more, on all {case.gpus} GPUs; Ctrl-C skips that", file=sys.stderr)
    try:
        check.simulate()
    except KeyboardInterrupt:
        # It came between two simulations.
        check.stop(INTERRUPTED)
        check.simulate()
    return check.plan()


def contradicts(case: PlanCase, part: GoodputPlan, plan: GoodputPlan) -> bool:
    """Whether later figures of the part say that the first layout of a plan does not carry the plan's rate."""
    best, copies = plan.layouts[0], Fraction(plan.copies).limit_denominator()
    gpus = best.layout.gpus - plan.filled_gpus
    scaled_up = [_times(each, copies) for each in part.layouts]
    own = [each for each in scaled_up if each.layout.gpus == gpus and is_part(each.layout, best.layout)]
    return best.carries_rate and any(_is_below(_carried_at_most(case, best.layout, each), plan.rate) for each in own)


class _Whole(NamedTuple):
    """A layout of the whole cluster.

    Attributes:
        part: the layout of the part.
        copies: of the part, which it consists of, beside replicas on GPUs that were left.
        is_enlarged: fewer copies should carry the rate, and simulations showed that they do not.
        is_settled: the search of the number of copies came to its end.
    """

    appraised: Appraised
    part: Appraised
    copies: Fraction
    is_enlarged: bool = False
    is_settled: bool = True


class _Check:
    """The simulations of one whole cluster.

    Once they are stopped, what is known decides.

    Args:
        plan: what does not depend on simulations of the whole.
    """

    def __init__(self, case: PlanCase, plan: GoodputPlan, part: GoodputPlan, trials: Trials, wishes: Wishes) -> None:
        self._case, self._plan, self._part, self._trials, self._wishes = case, plan, part, trials, wishes
        self._found: list[_Whole] = []
        self._stopped = ""
        self._is_decided = True

    def stop(self, why: str) -> None:
        """Make no further simulations."""
        self._stopped = why

    def simulate(self) -> None:
        """Simulate the layouts of the part as whole clusters, the best one first. After Ctrl-C only that one."""
        best, *others = self._part.layouts
        uses_all = self._wishes.uses_all
        is_last = self._part.stopped == INTERRUPTED and not self._stopped
        seeds = 1 if is_last else SEEDS
        first = self._best_filled(best, seeds) if uses_all else self._sized(best, seeds)
        self._found = [] if first is None else [first]
        if first is None:
            return
        # Where the most goodput is wanted, alternatives only replace a layout that fails.
        is_final = uses_all and first.appraised.carries_rate
        if is_last:
            self._is_decided &= is_final or not others
            return
        if uses_all:
            wholes = [self._filled(each, decides=not is_final) for each in others]
            self._found += [whole for whole in wholes if whole is not None]
            if not is_final:
                self._replace_failing()
            return
        # Most of them carry the rate with the copies that should do. Those simulations share the cores.
        self._made([self._task(layout, self._plan.rate, 0) for layout in map(self._expected, others)])
        sized = [self._sized(each, 1) for each in others]
        self._found += sorted((whole for whole in sized if whole is not None and whole.is_settled), key=_order)
        self._replace_best()

    def plan(self) -> GoodputPlan:
        """The plan, as far as it was simulated."""
        is_decided = self._plan.is_decided and self._is_decided
        stopped = self._part.stopped if self._part.stopped == INTERRUPTED else self._stopped or self._part.stopped
        plan = replace(self._plan, stopped=stopped, is_decided=is_decided)
        if not self._found:
            return self._unchecked(plan)
        best, *rest = _distinct(self._found)
        is_first = best.part is self._part.layouts[0]
        fewest = self._able(best.part)
        # Variations of a part are simulated for as few copies as should do.
        keeps_variations = is_first and (not fewest or best.copies == fewest[0])
        keeps_step = is_first and best.appraised.carries_rate and not best.appraised.goodput_is_least
        tied = [each.appraised.layout for each in rest if each.part.layout in self._part.tied]
        others = [each.appraised for each in rest]
        others = others if plan.has_fewest_gpus else by_goodput(others)
        return replace(
            plan,
            layouts=[best.appraised, *others][: self._wishes.top],
            copies=float(best.copies),
            is_enlarged=best.is_enlarged,
            is_settled=best.is_settled,
            variations=plan.variations if keeps_variations else [],
            next_step=_next_step(self._part, best.copies) if keeps_step else None,
            trials=plan.trials + self._trials.made,
            tied=tied if is_first else [],
        )

    def _unchecked(self, plan: GoodputPlan) -> GoodputPlan:
        """The plan without a simulation of the whole."""
        best = self._part.layouts[0]
        able = self._able(best)
        copies = max([Fraction(plan.scale), *able[:1]])
        return replace(
            plan,
            layouts=[replace(_times(best, copies), carries_rate=best.carries_rate or bool(able))],
            copies=float(copies),
            variations=[] if able and able[0] != copies else plan.variations,
            next_step=_next_step(self._part, copies),
            is_checked=False,
        )

    def _best_filled(self, part: Appraised, seeds: int) -> _Whole | None:
        """The best layout with replicas on the GPUs that the parts left, unless it attains less with them.

        None: it was not simulated.
        """
        copies = Fraction(self._plan.scale)
        scaled_up, full = self._scaled_up(part), self._full(part)
        known = self._attained(scaled_up, seeds)
        if not known:
            return None
        if full == scaled_up or not (more := self._attained(full, seeds)):
            return _Whole(self._appraised(scaled_up, part, copies, known), part, copies)
        met, more_met = (fmean(trial.met for trial in each[: len(more)]) for each in (known, more))
        is_worse = more_met < met - _WORSE
        if is_worse or (self._carry(known) and not self._carry(more)):
            shares = f"attains {more_met:.1%} of the rounds, and this one {met:.1%}"
            shown = shares if is_worse else "does not carry the rate"
            self._plan = replace(self._plan, fuller=(full, shown))
            return _Whole(self._appraised(scaled_up, part, copies, known), part, copies)
        self._plan = replace(self._plan, filled_gpus=full.gpus - scaled_up.gpus)
        return _Whole(self._appraised(full, part, copies, more), part, copies)

    def _filled(self, part: Appraised, *, decides: bool) -> _Whole | None:
        """An alternative with replicas on the GPUs that the parts left; None: it was not simulated.

        `decides`: it may become the best layout, so the plan is not decided without it.
        """
        copies, full = Fraction(self._plan.scale), self._full(part)
        known = self._attained(full, 1, decides=decides)
        return _Whole(self._appraised(full, part, copies, known), part, copies) if known else None

    def _scaled_up(self, part: Appraised) -> Layout:
        return in_proportion(part.layout, Fraction(self._plan.scale))

    def _full(self, part: Appraised) -> Layout:
        return filled(self._scaled_up(part), self._case.degrees, self._case.gpus, _bound(self._case))

    def _able(self, part: Appraised) -> list[Fraction]:
        """The numbers of copies that should carry the rate, and more of them. The fewest come first."""
        if not self._part.has_fewest_gpus:
            return []
        if part.goodput is not None:
            if not part.goodput.mean:
                return []
            least = self._plan.rate / part.goodput.mean
        elif part.carries_rate:
            least = float(self._plan.scale)
        else:
            return []
        most = ceil(_MORE * max(self._plan.scale, least))
        able = copies_between(part.layout, least, most)
        return [copies for copies in able if in_proportion(part.layout, copies).gpus <= self._case.gpus]

    def _expected(self, part: Appraised) -> Layout:
        """The layout of the whole that should carry the rate."""
        return in_proportion(part.layout, [*self._able(part), Fraction(self._plan.scale)][0])

    def _sized(self, part: Appraised, seeds: int) -> _Whole | None:
        """The layout with the fewest copies that carry the rate in simulations of the whole.

        If the simulations are stopped before that is known, the fewest that carried it, or else the most that failed.
        None: there is neither.
        """
        able = self._able(part) or [Fraction(self._plan.scale)]
        carrying, failing = None, None
        # The fewest first, because the part says that they suffice. If they do not, the number is searched by halving.
        low, high, number = 0, len(able), 0
        while low < high and (known := self._attained(in_proportion(part.layout, able[number]), seeds)):
            if self._carry(known):
                if carrying is not None and len(known) < seeds:
                    break  # further seeds showed that more copies carry it
                carrying, high = able[number], number
            else:
                failing, low = able[number], number + 1
            number = (low + high) // 2
        copies = failing if carrying is None else carrying
        if copies is None:
            return None
        layout = in_proportion(part.layout, copies)
        appraised = self._appraised(layout, part, copies, self._attained(layout, seeds))
        return _Whole(appraised, part, copies, copies != able[0], is_settled=low >= high)

    def _replace_best(self) -> None:
        """An alternative becomes the best layout, if it has fewer GPUs and carries the rate with as many seeds."""
        best, *others = self._found
        judged: list[_Whole] = []
        for other in others:
            several: _Whole | None = other
            if _is_better(other, best):
                several = self._sized(other.part, SEEDS)
            if several is None or not (several.is_settled or several.appraised.carries_rate):
                continue  # further seeds refuted it, and then there was no time for more copies
            if _replaces(several, best):
                best, several = several, best
            judged.append(several)
        self._found = [best, *sorted(judged, key=_order)]

    def _replace_failing(self) -> None:
        """An alternative becomes the best layout, if only it carries the rate, with as many seeds."""
        kept = self._plan
        best, *others = self._found
        for number, other in enumerate(others):
            if not _is_better(other, best):
                continue
            self._plan = replace(kept, filled_gpus=0, fuller=None)
            several = self._best_filled(other.part, SEEDS)
            if several is None:
                continue
            if _replaces(several, best):
                del others[number]
                self._found = [several, best, *others]
                return
            others[number] = several
        self._found = [best, *others]
        self._plan = kept

    def _attained(self, layout: Layout, seeds: int, *, decides: bool = True) -> list[Trial]:
        """Trials at the plan's rate, one per seed: as many as there is time for, and further ones that are known."""
        tasks = [self._task(layout, self._plan.rate, seed) for seed in range(max(seeds, SEEDS))]
        known = self._made(tasks[:seeds], decides=decides)
        if len(known) == seeds:
            known += [trial for task in tasks[seeds:] if (trial := self._trials.known(task)) is not None]
        return known

    def _made(self, tasks: Sequence[TrialTask], *, decides: bool = False) -> list[Trial]:
        """The trials that are known, after those were made for which there is time.

        `decides`: without all of them another layout may be the best one.
        """
        if not self._stopped:
            try:
                return self._trials.trials(tasks)
            except TimeOverError:
                self.stop(time_over(self._wishes.budget_s))
            except KeyboardInterrupt:
                self.stop(INTERRUPTED)
        known = [trial for task in tasks if (trial := self._trials.known(task)) is not None]
        if decides and len(known) < len(tasks):
            self._is_decided = False
        return known

    def _appraised(self, layout: Layout, part: Appraised, copies: Fraction, known: Sequence[Trial]) -> Appraised:
        """The figures of a whole layout. Trials of the part tell its goodput, if the whole carries the plan's rate."""
        rate, scaled_up = self._plan.rate, _times(part, copies)
        has_more = layout.gpus > scaled_up.layout.gpus
        holds = self._carry(known)
        # The part's long simulations know better than a short check.
        is_refuted = holds and _is_below(_carried_at_most(self._case, layout, scaled_up), rate)
        assert known[0].result is not None
        curve = {rate: known[0]}
        # Of a layout with more replicas than the parts, no other rate is known.
        figure, is_least = scaled_up.goodput, part.goodput_is_least or has_more
        if not holds:
            figure, is_least = self._lowered(layout, figure, curve), False
        elif not has_more:
            curve = dict(scaled_up.curve) | curve
        if figure is not None and is_least:
            figure = Figure(figure.mean, None, None, figure.seeds)
        return Appraised(
            layout,
            Figure.of([trial.met for trial in known], 1.0),
            holds and not is_refuted,
            figure,
            sorted(curve.items(), key=lambda item: item[0]),
            known[0].result,
            is_least and figure is not None,
            scaled_up if holds and has_more else None,
            is_refuted,
        )

    def _lowered(self, layout: Layout, known: Figure | None, curve: dict[float, Trial]) -> Figure | None:
        """The first lower rate that the layout carries, for one seed; None: it is not known. Adds to the curve.

        `known`: what the trials of the part say.
        """
        rate = self._plan.rate
        if known is not None and 0 < known.mean < rate:
            rate = known.mean * _LOWER
        for _ in range(_LOWERINGS):
            rate /= _LOWER
            made = self._made([self._task(layout, rate, 0)])
            if not made:
                return None
            curve[rate] = made[0]
            if made[0].carries(self._case.attainment):
                return Figure(rate, None, None, 1)
        return None

    def _carry(self, trials: Sequence[Trial]) -> bool:
        return carried_on_average(trials, self._case.attainment)

    def _task(self, layout: Layout, rate: float, seed: int) -> TrialTask:
        return TrialTask(layout, rate, ONCE, self._case.options.seed + seed, margin=None, keeps_result=True)


def _carried_at_most(case: PlanCase, layout: Layout, scaled_up: Appraised) -> float:
    """The rate that a whole layout carries by the long simulations of its part; infinite: they do not limit it.

    Replicas beside the parts raise it as much as they raise the rate that the costs allow.
    """
    if scaled_up.goodput is None or scaled_up.goodput_is_least:
        return inf
    if layout == scaled_up.layout:
        return scaled_up.goodput.mean
    bound = _bound(case)
    parts = bound(scaled_up.layout)
    return scaled_up.goodput.mean * bound(layout) / parts if parts else inf


def _is_below(carried: float, rate: float) -> bool:
    """The tolerance is for fractions of copies."""
    return carried < rate * (1 - 1e-9)


def _bound(case: PlanCase) -> Callable[[Layout], float]:
    """About the rate that a layout carries, by the costs of the mean session."""
    return costs_of(case).with_queues().bound


def _distinct(wholes: Sequence[_Whole]) -> list[_Whole]:
    """The first one of each layout: copies of two parts, with replicas on what these left, may be the same layout."""
    first: dict[Layout, _Whole] = {}
    for whole in wholes:
        first.setdefault(whole.appraised.layout, whole)
    return list(first.values())


def _is_better(whole: _Whole, than: _Whole) -> bool:
    """Whether it carries the rate, and with fewer GPUs, or the other one does not carry it."""
    return whole.appraised.carries_rate and _order(whole) < _order(than)


def _replaces(whole: _Whole, best: _Whole) -> bool:
    """Whether it is better than the best one so far, by as many seeds."""
    return _is_better(whole, best) and whole.appraised.attainment.seeds >= best.appraised.attainment.seeds


def _order(whole: _Whole) -> tuple[bool, int]:
    """Those that carry the rate come first, of them those with the fewest GPUs."""
    carries = whole.appraised.carries_rate
    return not carries, whole.appraised.layout.gpus if carries else 0


def _next_step(part: GoodputPlan, copies: Fraction) -> NextStep | None:
    """What more GPUs buy, with so many copies of the part."""
    if (step := part.next_step) is None:
        return None
    best, larger = (in_proportion(each.layout, copies) for each in (part.layouts[0], step.best))
    return NextStep(larger.gpus - best.gpus, _times(step.best, copies), step.gain.times(float(copies)))


def _times(part: Appraised, copies: Fraction) -> Appraised:
    """A layout of `copies` times as many replicas, with the figures of the part at as many times its rates."""
    factor = float(copies)
    return replace(
        part,
        layout=in_proportion(part.layout, copies),
        goodput=part.goodput and part.goodput.times(factor),
        curve=[(rate * factor, trial) for rate, trial in part.curve],
    )
