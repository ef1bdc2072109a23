"""The plan: the layouts that trials found best, their figures, and what the next GPUs would buy.

The best layout is the one with the fewest GPUs that carries the rate. With `--use-all` it is the layout of all GPUs
that carries most. That layout is also shown if no layout carries the rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from math import floor, inf, log10

from ampd.reports.figures import format_number
from planner.layout.agenda import Steps
from planner.layout.alternatives import of_other_kinds
from planner.layout.appraisal import SEEDS, Appraised, Appraiser
from planner.layout.case import PlanCase
from planner.layout.copies import fewest_copies, in_proportion
from planner.layout.demand import demand_of
from planner.layout.fluid import proposals
from planner.layout.goodput import PRECISION
from planner.layout.goodput_search import Search
from planner.layout.layout import Layout
from planner.layout.neighbours import filled, neighbours
from planner.layout.plan import INTERRUPTED, GoodputPlan, NextStep, Wishes, by_goodput, time_over
from planner.layout.race import race, ranking, tied
from planner.layout.trial import SHORT, TimeOverError, TrialTask
from planner.layout.trials import Trials
from planner.layout.whole import scale_of
from planner.layout.whole_again import plan_of_whole

_SEARCH_SHARE, _FIGURES_SHARE = 0.8, 0.6
"""The search for a part of a cluster ends after the first share of the time, and its figures after the second one. The
rest is for the check of the whole cluster."""
_LEAST_LAYOUTS = 3
"""Layouts of a part that are judged at least, because the best one for the part may not be the best one for the whole,
which has no whole number of parts."""
_CHECKED = 4
"""Most layouts of one number of GPUs that get a longer trial, where the fewest GPUs are wanted."""
_CANDIDATES, _FINALISTS = 12, 6
"""Layouts that are compared by one long trial, and those of them that are compared by their goodput in long trials,
where the most goodput is wanted."""
_FIRST = 2
"""The best layouts of the search, whose goodput in long trials tells at which rate the candidates are compared."""
_JUST_ABOVE = 1.04
"""Layouts are told apart best at this many times the highest rate that is carried."""
_MOST_SHARE = 0.4
"""The search for the most goodput ends after this share of the time that is left for it, its comparison and figures."""
_FIGURES = 60
"""The comparison of the best layouts leaves time for this many trials, which the figures need."""
_ENLARGEMENTS = 4
"""Most trials of a layout with a reserve, after the time for the search is over."""
_MOST_OVER = 1.25
"""After this many times the budget no larger one is tried."""
_ROUNDINGS = 3
"""Most tries to find a round rate below the goodput that is carried too."""
_NEXT = 6
"""Most layouts that are tried with more GPUs."""
_BETTER = 1.02
"""Layouts with more GPUs are tried at this many times the present goodput."""


def make_goodput_plan(case: PlanCase, wishes: Wishes) -> GoodputPlan:
    """Plan. Ctrl-C ends the search, and the plan has the best layouts so far."""
    end_s = time.monotonic() + wishes.budget_s
    scale = scale_of(case, uses_all=wishes.uses_all)
    part = replace(case, gpus=case.gpus // scale, rate=case.rate / scale)
    if scale == 1:
        with Trials(part, wishes.jobs, wishes.budget_s) as trials:
            return _Planner(part, wishes, trials).plan()
    print(f"searching layouts for 1/{scale} of the {case.gpus} GPUs", file=sys.stderr)
    wishes_of_part = replace(
        wishes,
        top=max(wishes.top, _LEAST_LAYOUTS),
        search_share=_SEARCH_SHARE,
        figures_share=_FIGURES_SHARE,
        scale=scale,
    )
    with Trials(part, wishes.jobs, _SEARCH_SHARE * wishes.budget_s) as trials:
        planner = _Planner(part, wishes_of_part, trials)
        plan = planner.plan()
        whole = replace(case, rate=plan.rate * scale)
        with Trials(whole, wishes.jobs, max(end_s - time.monotonic(), 0.0)) as wholes:
            return plan_of_whole(case, planner, plan, wishes, wholes)


class _Planner:
    """One plan in the making."""

    def __init__(self, case: PlanCase, wishes: Wishes, trials: Trials) -> None:
        self._case, self._wishes, self._trials = case, wishes, trials
        self._search = Search(case, trials)
        self._appraiser = Appraiser(case, trials, case.rate)
        self._shown: list[Layout] = []
        self._has_fewest = False
        self._has_ended_search = False
        self._next: Layout | None = None
        self._fuller: tuple[Layout, str] | None = None
        self._stopped = ""
        self._is_estimated = False

    def plan(self) -> GoodputPlan:
        with self._until_stopped():
            if self._wishes.uses_all or not self._find_fewest():
                left_s = self._figures_s - self._trials.elapsed_s
                # Where the search for the fewest GPUs took all of it, the trials' own end is the limit.
                with self._phase(self._figures_s - (1 - _MOST_SHARE) * left_s if left_s > 0 else inf):
                    self._search.most()
                self._compare()
            self._has_ended_search = True
            self._trials.end_at(self._figures_s)
            self._show_figures()
        return self._plan()

    @property
    def scale(self) -> int:
        """Of how many such parts the cluster consists."""
        return self._wishes.scale

    @property
    def lacks_figures(self) -> bool:
        """Whether the search ended, and there was no time for all figures of its layouts."""
        return self._has_ended_search and self._stopped not in {"", INTERRUPTED}

    @property
    def _is_decided(self) -> bool:
        """Whether more time would find the same layout."""
        if self._trials.is_cut or not self._has_ended_search:
            return False
        first, *others = self._shown
        if self._wishes.scale == 1 or not self._has_fewest:
            return True
        # One whose copies take fewer GPUs would be the first one.
        is_known = all(map(self._appraiser.seeds, self._shown))
        return is_known and all(self._whole_gpus(layout) >= self._whole_gpus(first) for layout in others)

    def go_on(self, end_s: float, *, with_goodputs: bool) -> GoodputPlan:
        """The plan with the figures for which there was no time.

        Args:
            end_s: seconds after the start at which they are given up.
            with_goodputs: of the alternatives and the best layout too.
        """
        self._stopped = ""
        self._trials.go_on_until(end_s)
        with self._until_stopped():
            self._show_figures(with_goodputs=with_goodputs)
        return self._plan()

    def _show_figures(self, *, with_goodputs: bool = True) -> None:
        """Make the trials of the figures of the layouts that were chosen."""
        if self._has_fewest and with_goodputs:
            self._search_goodputs()
        varied = self._appraiser.variation_steps(
            self._shown[0], self._rate_per_copy(), with_as_planned=self._wishes.scale > 1
        )
        others = [self._appraiser.check_steps(layout, SEEDS) for layout in self._others()]
        self._trials.together([self._next_steps(), varied, *others])
        if self._has_fewest and not with_goodputs and not all(map(self._appraiser.seeds, self._shown)):
            raise TimeOverError  # goodputs are missing

    def _find_fewest(self) -> bool:
        """Whether a layout carries the rate, in long trials with several seeds too. The fewest GPUs are tried first."""
        self._search.fewest()
        tried: set[Layout] = set()
        widened: set[int] = set()
        while True:
            groups = _by_gpus(layout for layout in self._search.carrying if layout not in tried)
            if not groups:
                if not self._search.more():
                    return False
                continue
            layouts = groups[0]
            tried.update(layouts)
            if (best := self._confirmed(layouts)) is not None:
                rest = [layout for layout in self._search.carrying if layout not in tried]
                self._choose_fewest(best, [*layouts, *rest])
                return True
            if layouts[0].gpus not in widened:
                widened.add(layouts[0].gpus)
                self._search.beside(layouts)

    def _confirmed(self, layouts: Sequence[Layout]) -> Layout | None:
        """The best layout among these that carries the rate; None if there is none."""
        for layout in self._appraiser.promising(layouts[:_CHECKED]):
            self._appraiser.check([layout])
            if not self._appraiser.carries(layout) and self._appraiser.is_close(layout):
                self._appraiser.extend(layout, 2 * SEEDS)
            if self._appraiser.carries(layout):
                return layout
        return None

    def _choose_fewest(self, best: Layout, others: Sequence[Layout]) -> None:
        """Show the best layout and alternatives: two with the same number of GPUs, then larger ones."""
        count = self._wishes.top - 1
        if self._wishes.scale > 1:
            # Copies are made of them, so they need not carry the rate of the part.
            alternatives = of_other_kinds(best, [*others, *self._search.best], count)
        else:
            alternatives = [layout for layout in others if layout != best][:count]
        self._shown, self._has_fewest = [best, *alternatives], True

    def _search_goodputs(self) -> None:
        """The goodput of the layouts with the fewest GPUs, which orders the alternatives."""
        best, *alternatives = self._shown
        appraiser = self._appraiser
        searches = [appraiser.goodput_steps(best, SEEDS, self._case.rate)]
        self._trials.together([*searches, *map(self._alternative_steps, alternatives)])
        if self._wishes.scale > 1:
            self._choose_by_whole()
        else:
            self._shown.sort(key=lambda each: (each != best, not appraiser.carries(each), each.gpus))

    def _choose_by_whole(self) -> None:
        """Show that layout first whose copies take the fewest GPUs, by goodput of as many seeds as the best one has."""
        for layout in self._shown[1:]:
            if self._whole_gpus(layout) < self._whole_gpus(self._shown[0]):
                self._appraiser.search_goodput([layout], SEEDS, self._carried(layout))
                if self._whole_gpus(layout) < self._whole_gpus(self._shown[0]):
                    self._shown = [layout, *(each for each in self._shown if each != layout)]

    def _whole_gpus(self, layout: Layout) -> float:
        """GPUs of as many copies of a layout as carry the rate of the whole cluster."""
        copies = self._copies(layout)
        return inf if copies is None else in_proportion(layout, copies).gpus

    def _copies(self, layout: Layout) -> Fraction | None:
        """How many of them carry the rate of the whole cluster, by the layout's goodput; None: it is not known."""
        carried = self._carried(layout)
        return fewest_copies(layout, self._wishes.scale * self._case.rate / carried) if carried else None

    def _alternative_steps(self, layout: Layout) -> Steps:
        """The figures of a layout that is not the best one."""
        if self._wishes.scale == 1:
            yield from self._appraiser.check_steps(layout, 1)
        yield from self._appraiser.goodput_steps(layout, 1, self._case.rate)

    def _others(self) -> list[Layout]:
        """The alternatives of a plan for the most goodput. Those of the fewest GPUs have their figures before.

        Those of a part are checked as whole clusters.
        """
        return [] if self._has_fewest or self._wishes.scale > 1 else self._shown[1:]

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            yield
        except TimeOverError:
            share = 1.0 if self._has_ended_search else self._wishes.search_share
            self._stopped = time_over(self._wishes.budget_s, share)
        except KeyboardInterrupt:
            if not self._search.best:
                raise
            self._stopped = INTERRUPTED

    @property
    def _figures_s(self) -> float:
        """Seconds after the start at which figures are given up."""
        return self._wishes.figures_share * self._wishes.budget_s

    @contextmanager
    def _phase(self, end_s: float) -> Iterator[None]:
        """What is not known this many seconds after the start is left out, so that there is time for the figures."""
        try:
            with self._trials.ending_at(end_s):
                yield
        except TimeOverError:
            pass

    def _compare(self) -> None:
        """Rank the best layouts of the search by longer trials, all with the same seeds."""
        appraiser, begun_s, made = self._appraiser, self._trials.elapsed_s, self._trials.made
        start = self._rate_to_compare()
        finalists = self._finalists(start)
        trial_s = (self._trials.elapsed_s - begun_s) / max(self._trials.made - made, 1)
        try:
            with self._phase(self._figures_s - _FIGURES * trial_s):
                appraiser.search_goodput(finalists, SEEDS, start)
                race(appraiser, finalists)
        finally:
            # After Ctrl-C too: the seeds that all of them have decide, and not who had the luck of fewer seeds.
            self._shown = ranking(appraiser, finalists)[: self._wishes.top]
        appraiser.search_goodput(self._shown[:1], SEEDS, start)
        if appraiser.rate:
            appraiser.check(self._shown[:1])
        self._fill(start)
        if not self._case.rate:
            self._choose_rate(self._shown[0])

    def _finalists(self, start: float) -> list[Layout]:
        """Those of the search's best layouts whose goodput is worth several seeds, best first."""
        appraiser = self._appraiser
        several = appraiser.ranked(self._search.best[:_CANDIDATES], start)[: max(self._wishes.top, _FINALISTS)]
        appraiser.search_goodput(several, 1, start)
        several.sort(key=lambda layout: -self._carried(layout))
        # One seed does not tell rates apart that are this close.
        close = [layout for layout in several if self._carried(layout) * PRECISION >= self._carried(several[0])]
        return list(dict.fromkeys([*several[: self._wishes.top], *close]))

    def _choose_rate(self, best: Layout) -> None:
        """Check the best layout at a round rate that it carries, which becomes the plan's rate."""
        appraiser = self._appraiser
        for _ in range(_ROUNDINGS):
            if appraiser.rate and appraiser.carries(best):
                return
            if not (carried := self._carried(best)):
                # No rate is carried. The figures are for the lowest one that was tried.
                appraiser.rate = appraiser.lowest_rate(best)
                appraiser.check([best])
                return
            appraiser.rate = _rounded_down(carried)
            appraiser.check([best])
            # The rate may fail, although a higher one was carried. Then the goodput is lower.
            appraiser.search_goodput([best], SEEDS, appraiser.rate)

    def _rate_to_compare(self) -> float:
        """About the highest rate that the best layouts of the search carry in long trials.

        Short trials find too much of it, and far above it layouts are ranked wrongly.
        """
        search, first = self._search, self._search.best[:_FIRST]
        start = search.carried_rate or search.rate
        self._appraiser.search_goodput(first, 1, start)
        return max(map(self._carried, first), default=0.0) * _JUST_ABOVE or start

    def _fill(self, start: float) -> None:
        """Use the GPUs that the best layout leaves, unless it carries less then."""
        best = self._shown[0]
        full = filled(best, self._case.degrees, self._case.gpus, self._search.expected.bound)
        if full == best:
            return
        self._appraiser.search_as(best, full, self._carried(best) or start)
        if self._carried(full) >= self._carried(best) > 0:
            if self._appraiser.rate:
                self._appraiser.check([full])
            self._shown = [full, *(layout for layout in self._shown if layout != full)][: self._wishes.top]
        else:
            self._fuller = full, f"carries {format_number(self._carried(full))} sessions/s"

    def _rate_per_copy(self) -> float:
        """What a copy of the best layout has to carry in the cluster, which takes no more copies than it needs."""
        scale, rate = self._wishes.scale, self._appraiser.rate
        if scale == 1 or not self._has_fewest or (copies := self._copies(self._shown[0])) is None:
            return rate
        return scale * rate / float(copies)

    def _carried(self, layout: Layout) -> float:
        return self._appraiser.carried(layout)

    def _next_steps(self) -> Steps:
        """The search of the best layout with one replica more: with the fewest further GPUs that suffice for one."""
        best, step = self._shown[0], min(self._case.degrees)
        carried = self._carried(best)
        if not carried or self._appraiser.goodput_is_least(best):
            return
        present = best.gpus if self._has_fewest else self._case.gpus
        gpus = present + step
        found = [*proposals(self._search.expected, gpus), *neighbours(best, self._case.degrees, gpus)]
        larger = [layout for layout in dict.fromkeys(found) if layout.gpus > present]
        larger = sorted(larger, key=lambda layout: -self._search.expected.bound(layout))[:_NEXT]
        rate = _BETTER * carried
        tasks = [TrialTask(layout, rate, SHORT, self._case.options.seed) for layout in larger]
        yield tasks
        ranks = {
            task.layout: trial.rank(self._case.attainment)
            for task in tasks
            if (trial := self._trials.known(task)) is not None
        }
        if larger:
            found_best = min(larger, key=ranks.__getitem__)
            yield from self._appraiser.goodput_steps(found_best, SEEDS, rate, self._appraiser.precision(best))
            yield from self._appraiser.least_steps(found_best)
            self._next = found_best

    def _plan(self) -> GoodputPlan:
        appraiser, search = self._appraiser, self._search
        shown = self._shown or self._undecided()
        known_rate = self._carried(shown[0]) or search.carried_rate or search.rate or 1.0
        appraiser.rate = appraiser.rate or _rounded_down(known_rate)
        # Where the time was over, only the first layout is still worth waiting for.
        known = [layout for layout in shown if layout == shown[0] or self._is_known(layout)]
        layouts = [self._appraised(layout) for layout in known]
        if not self._has_fewest:
            # The first one was chosen with the seeds that all of them have, the others are as good as their figures.
            layouts = [layouts[0], *by_goodput(layouts[1:])]
        is_ranked = not self._has_fewest and layouts[0].goodput is not None
        if not (is_ranked or (self._has_fewest and self._wishes.scale > 1)):
            layouts.sort(key=lambda each: not each.carries_rate)
        is_unsure = self._wishes.uses_all or self._is_estimated or search.none_carries
        is_small = bool(self._stopped) and not is_unsure
        self._has_fewest |= is_small and layouts[0].carries_rate
        case = replace(self._case, rate=appraiser.rate)
        next_step = None
        if self._next is not None:
            gain = appraiser.gain(self._next, layouts[0].layout)
            if gain is not None:
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
            is_estimated=self._is_estimated,
            is_untried=self._wishes.uses_all and not (self._shown or search.carried_rate or layouts[0].goodput),
            none_carries=search.none_carries and not layouts[0].carries_rate,
            fuller=self._fuller,
            tied=self._tied(layouts[0].layout),
            carried_rate=search.carried_rate if layouts[0].layout == search.carried_by else 0.0,
        )

    def _is_known(self, layout: Layout) -> bool:
        """Whether a layout has the figures that an alternative needs."""
        return bool(self._appraiser.attainments(layout) if self._wishes.scale == 1 else self._appraiser.seeds(layout))

    def _tied(self, best: Layout) -> list[Layout]:
        """The other layouts shown that may carry as much, where the most goodput was searched."""
        return [] if self._has_fewest else tied(self._appraiser, best, self._shown)

    def _appraised(self, layout: Layout) -> Appraised:
        found = self._appraiser.appraised(layout)
        checks = len(self._appraiser.attainments(layout))
        if found.goodput is not None and not checks:
            # It is known from long trials, and the rate was tried in a short one only.
            return replace(found, carries_rate=found.goodput.mean >= self._appraiser.rate)
        # One short trial at the rate may pass by chance, although the search has shown that the layout fails.
        is_refuted = self._search.none_carries and checks < SEEDS
        # By chance the checks may pass too, although lower rates fail.
        is_refuted |= found.goodput is not None and found.goodput.mean < self._appraiser.rate
        return replace(found, carries_rate=found.carries_rate and not is_refuted)

    def _closest(self) -> list[Layout]:
        """The layouts of the search for the most goodput, those first whose goodput is known, the highest first."""
        first = [] if self._search.carried_by is None else [self._search.carried_by]
        return sorted(dict.fromkeys([*first, *self._search.best]), key=lambda layout: -self._carried(layout))

    def _undecided(self) -> list[Layout]:
        """The best layouts of a search that was stopped.

        Where a rate is wanted, a layout that misses it is no answer. If none was found to carry it, one with a reserve
        is tried, and enlarged as long as it fails.
        """
        search, case = self._search, self._case
        if self._wishes.uses_all or search.none_carries:
            return self._closest()[: self._wishes.top]
        carrying = [layout for layout in search.carrying if not self._appraiser.fails(layout)]
        if carrying:
            return carrying[: self._wishes.top]
        self._is_estimated = True
        layout = search.estimated()
        for _ in range(_ENLARGEMENTS):
            trial = self._trials.make(TrialTask(layout, case.rate, SHORT, case.options.seed))
            larger = search.enlarged(layout)
            fails = layout in search.failed or self._appraiser.fails(layout)
            is_late = self._trials.elapsed_s > _MOST_OVER * self._wishes.budget_s
            if larger is None or is_late or (trial.carries(case.attainment) and not fails):
                break
            layout = larger
        return [layout]


def _by_gpus(layouts: Iterable[Layout]) -> list[list[Layout]]:
    """Groups of equal GPUs, fewest first."""
    return [list(group) for _, group in groupby(layouts, lambda layout: layout.gpus)]


def _rounded_down(rate: float) -> float:
    """A positive rate to two significant digits."""
    step = 10.0 ** (floor(log10(rate)) - 1)
    return round(floor(rate / step) * step, 12)
