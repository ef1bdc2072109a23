"""The figures of layouts over several seeds: attainment at a rate, goodput, and attainment in variations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from planner.intervals import mean_interval
from planner.layout.agenda import Steps
from planner.layout.case import PlanCase
from planner.layout.goodput import PRECISION, goodput, is_least, next_rate, room
from planner.layout.layout import Layout
from planner.layout.trial import AS_PLANNED, DECIDES, LONG, SHORT, Trial, TrialTask, Variation
from planner.layout.trials import Trials
from planner.sustained import IN_TIME

SEEDS = 3
"""Seeds of the figures of the best layout."""
_AT_A_TIME = 2
"""Further seeds that are tried before it is asked again whether more of them can help."""
_COARSE = 1.1
"""Precision of the goodput of a single seed, from which only the interval comes."""
_ROUNDING = 1e-9

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
    def of(
        cls, values: Sequence[float], most: float | None = None, least: float | None = 0.0, error: float = 0.0
    ) -> Figure:
        """The figure of one value per seed.

        Its interval stays between `least` and `most` (None: no bound). `error`: standard deviation of each value, as
        it was measured, from the true one of its seed.
        """
        mean, half, seeds = mean_interval(values, error)
        if not isfinite(half):
            return cls(mean, None, None, seeds)
        high = mean + half if most is None else min(mean + half, most)
        low = mean - half if least is None else max(mean - half, min(least, mean))
        return cls(mean, low, high, seeds)

    def times(self, factor: float) -> Figure:
        """The figure in another unit."""
        low, high = (None if value is None else factor * value for value in (self.low, self.high))
        return Figure(factor * self.mean, low, high, self.seeds)

    def widened(self, below: float, above: float, least: float | None = 0.0) -> Figure:
        """With an interval that reaches further, because the mean itself is not known exactly."""
        if self.low is None or self.high is None:
            return self
        low = self.low - below
        return replace(self, low=low if least is None else max(low, min(least, self.mean)), high=self.high + above)

    def moved(self, mean: float, least: float | None = 0.0) -> Figure:
        """Another value with an interval of the same width."""
        if self.low is None or self.high is None:
            return replace(self, mean=mean)
        half = self.high - self.mean
        low = mean - half if least is None else max(mean - half, min(least, mean))
        return Figure(mean, low, mean + half, self.seeds)


class Varied(NamedTuple):
    """A layout under other circumstances: the rounds that it attains, and whether it still carries the rate.

    `in_time`: the share of the sessions that end in time, which decides too.
    """

    variation: Variation
    attainment: Figure
    carries: bool
    in_time: float


@dataclass(frozen=True, slots=True)
class Appraised:
    """A layout with its figures.

    Attributes:
        attainment: share of the rounds within both targets at the plan's rate.
        carries_rate: whether it carries that rate, on average over the seeds.
        goodput: the highest rate that it carries, in sessions per second, judged as for `carries_rate`. Its interval is
            over the single seeds. None: the time did not suffice.
        goodput_is_least: the search ended although no rate was too high, so it carries the goodput or more. Such a
            goodput has no interval.
        curve: trials of the first seed by rate, ascending.
        simulated: the result of one trial at the plan's rate.
        unfilled: the parts alone, of a layout that carries the rate and got replicas beside the parts of a large
            cluster. Other rates were tried only for these parts.
        is_refuted_by_part: the whole of a large cluster carries the rate in its short check, but the goodput of its
            part in long simulations, times the copies, is lower. So it does not count as carrying the rate.
    """

    layout: Layout
    attainment: Figure
    carries_rate: bool
    goodput: Figure | None
    curve: Sequence[tuple[float, Trial]]
    simulated: dict[str, Any]
    goodput_is_least: bool = False
    unfilled: Appraised | None = None
    is_refuted_by_part: bool = False

    def carries_at(self, rate: float, trial: Trial, attainment: float) -> bool:
        """Whether it carries a rate of the curve: as its goodput says, which several seeds decide, if it is known."""
        is_known = not self.goodput_is_least or self.is_refuted_by_part
        if self.goodput is not None and (rate <= self.goodput.mean or is_known):
            return rate <= self.goodput.mean
        return trial.carries(attainment)


class _Searched(NamedTuple):
    """How the goodput of a layout was searched."""

    seeds: int
    precision: float


class Appraiser:
    """Makes trials of layouts, and reads figures from the trials that were made.

    A layout carries a rate if the shares of rounds and of sessions, on average over the seeds, suffice. The plan's rate
    and the goodput are judged by the same rule, so they cannot contradict each other.
    """

    def __init__(self, case: PlanCase, trials: Trials, rate: float) -> None:
        self._case = case
        self._trials = trials
        self.rate = rate
        self._seeds: dict[Layout, int] = {}
        self._rates: dict[Layout, dict[float, None]] = {}
        self._searched: dict[Layout, _Searched] = {}
        self._varied_rate = rate
        self._variations: Sequence[Variation] = VARIATIONS

    def check(self, layouts: Sequence[Layout], seeds: int = SEEDS) -> None:
        """Trials at the plan's rate."""
        self._trials.together(self.check_steps(layout, seeds) for layout in layouts)

    def extend(self, layout: Layout, seeds: int) -> None:
        """As `check`, with further seeds as long as they can still show that the layout carries the rate."""
        while (count := len(known := self._known_checks(layout))) < seeds:
            if not may_be_carried(known, self._case.attainment, seeds):
                return
            self.check([layout], min(count + _AT_A_TIME, seeds))

    def promising(self, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts, those first that do best in one longer trial."""
        return self.ranked(layouts, self.rate, keeps_result=True)

    def ranked(self, layouts: Sequence[Layout], rate: float, *, keeps_result: bool = False) -> list[Layout]:
        """The layouts, those first that do best in one long trial at this rate."""
        tasks = [replace(self._task(layout, rate, 0), keeps_result=keeps_result) for layout in layouts]
        trials = dict(zip(layouts, self._trials.trials(tasks), strict=True))
        return sorted(layouts, key=lambda layout: trials[layout].rank(self._case.attainment))

    def search_goodput(self, layouts: Sequence[Layout], seeds: int, start: float, precision: float = PRECISION) -> None:
        """Search the highest rate of each layout, all layouts at the same time."""
        self._trials.together(self.goodput_steps(layout, seeds, start, precision) for layout in layouts)

    def search_as(self, known: Layout, layout: Layout, start: float) -> None:
        """Search the highest rate of a layout with the seeds and the precision of one whose goodput is known."""
        searched = self._searched[known]
        self.search_goodput([layout], searched.seeds, start, searched.precision)

    def goodput_steps(self, layout: Layout, seeds: int, start: float, precision: float = PRECISION) -> Steps:
        """The search of the highest rate of a layout.

        Args:
            seeds: how many, at least.
            start: a rate that is about right.
            precision: of what the layout carries with all seeds together, at least. It is never coarser than before.
        """
        self._know(layout, self.rate, 1)
        seeds = max(seeds, self._seeds[layout])
        if layout in self._searched:
            precision = min(precision, self.precision(layout))
        yield from self._rate_steps(layout, [0], start, _COARSE)
        start = goodput(self._carried(layout, [0])) or start
        yield from self._rate_steps(layout, range(seeds), start, precision)
        # Only now, so a search that is stopped leaves what is known with fewer seeds.
        self._seeds[layout], self._searched[layout] = seeds, _Searched(seeds, precision)
        for seed in range(1, seeds):
            yield from self._rate_steps(layout, [seed], start, _COARSE)

    def _rate_steps(self, layout: Layout, seeds: Sequence[int], start: float, precision: float) -> Steps:
        """The search of the rate that a layout carries with these seeds together."""
        while tasks := self._next(layout, seeds, start, precision):
            yield tasks

    def check_steps(self, layout: Layout, seeds: int) -> Steps:
        """Trials at the plan's rate."""
        self._know(layout, self.rate, seeds)
        yield self._checks(layout)

    def variation_steps(self, layout: Layout, rate: float, *, with_as_planned: bool) -> Steps:
        """The trials in which the load or the engines differ from those of the case.

        Args:
            rate: as planned.
            with_as_planned: without any difference too, because no other figures are comparable.
        """
        self._varied_rate = rate
        self._variations = (AS_PLANNED, *VARIATIONS) if with_as_planned else VARIATIONS
        yield [task for each in self._variations for task in self._variants(layout, each)]

    def variations(self, layout: Layout) -> list[Varied]:
        """The variations that were tried, judged as the plan's rate and the goodput are."""
        found = []
        for each in self._variations:
            known = [self._trials.known(task) for task in self._variants(layout, each)]
            if trials := [trial for trial in known if trial is not None]:
                attained = Figure.of([trial.met for trial in trials], 1.0)
                carries = carried_on_average(trials, self._case.attainment)
                found.append(Varied(each, attained, carries, fmean(trial.in_time for trial in trials)))
        return found

    def appraised(self, layout: Layout) -> Appraised:
        """The figures that are known. At least one short trial at the rate is made, even if no time is left."""
        missing = self._missing(layout)
        known = self._known_checks(layout) if missing is None else [self._trials.make(missing)]
        assert known[0].result is not None
        rates = {rate: self._trials.known(self._task(layout, rate, 0)) for rate in self._rates.get(layout, {})}
        curve = [(rate, trial) for rate, trial in sorted(rates.items()) if trial is not None]
        return Appraised(
            layout,
            Figure.of([trial.met for trial in known], 1.0),
            carried_on_average(known, self._case.attainment),
            self.goodput(layout),
            curve or [(self.rate, known[0])],
            known[0].result,
            self.goodput_is_least(layout),
        )

    def least_steps(self, layout: Layout) -> Steps:
        """The short trial that `appraised` would make."""
        if (missing := self._missing(layout)) is not None:
            yield [missing]

    def _missing(self, layout: Layout) -> TrialTask | None:
        """The short trial at the rate that a layout without a check needs."""
        known = self._known_checks(layout)
        if known and known[0].result is not None:
            return None
        return TrialTask(layout, self.rate, SHORT, self._case.options.seed, None, True)

    def attainments(self, layout: Layout) -> list[float]:
        """Attainment at the plan's rate by seed, as far as known."""
        return [trial.met for trial in self._known_checks(layout)]

    def carries(self, layout: Layout) -> bool:
        """Whether it carries the plan's rate, on average over the seeds that are known."""
        known = self._known_checks(layout)
        return bool(known) and carried_on_average(known, self._case.attainment)

    def is_close(self, layout: Layout) -> bool:
        """Whether the shares of rounds and of sessions may suffice: their intervals over the seeds include enough."""
        known = self._known_checks(layout)
        needs = ((self._case.attainment, [trial.met for trial in known]), (IN_TIME, [each.in_time for each in known]))
        return all(share >= least for least, shares in needs for share in [sum(mean_interval(shares)[:2])])

    def fails(self, layout: Layout) -> bool:
        """Whether trials have shown that it does not carry the plan's rate: its checks, or its one longer trial."""
        known = self._known_checks(layout)
        first = self._trials.known(self._task(layout, self.rate, 0))
        if known:
            return not carried_on_average(known, self._case.attainment)
        return first is not None and not first.carries(self._case.attainment)

    def goodput(self, layout: Layout) -> Figure | None:
        """The highest rate that it carries; None: the search has not ended."""
        if layout not in self._searched:
            return None
        together, seeds = self.carried(layout), self.seeds(layout)
        if self.goodput_is_least(layout):
            return Figure(together, None, None, seeds)
        singles = [goodput(self._carried(layout, [seed])) for seed in range(seeds)]
        return Figure.of(singles, error=self._error(layout)).moved(together).widened(0.0, self._room(layout))

    def carried(self, layout: Layout, seeds: int | None = None) -> float:
        """The highest rate that it carries; 0 if it is not known. `seeds`: with the first ones only; None: with all."""
        if layout not in self._searched:
            return 0.0
        return goodput(self._carried(layout, range(self.seeds(layout))[:seeds]))

    def seeds(self, layout: Layout) -> int:
        """The seeds of its goodput; 0: it is not known."""
        return self._searched[layout].seeds if layout in self._searched else 0

    def goodput_is_least(self, layout: Layout) -> bool:
        """Whether the search of its goodput ended although no rate was too high."""
        return layout in self._searched and is_least(self._carried(layout, range(self.seeds(layout))))

    def lowest_rate(self, layout: Layout) -> float:
        """The lowest rate at which it was tried."""
        return min(self._rates[layout])

    def gain(self, layout: Layout, other: Layout) -> Figure | None:
        """How much more the layout carries than the other one. The interval is over the differences by seed.

        None: it is not known what one of them carries, or only that it is the goodput or more.
        """
        if (differences := self._differences(layout, other)) is None:
            return None
        mean, *singles = differences
        error = hypot(self._error(layout), self._error(other))
        figure = Figure.of(singles, least=None, error=error).moved(mean, None)
        return figure.widened(self._room(other), self._room(layout), None)

    def _differences(self, layout: Layout, other: Layout) -> list[float] | None:
        """How much more the layout carries with all seeds that both have, then with each; None as for `gain`."""
        if not (self.seeds(layout) and self.seeds(other)):
            return None
        if self.goodput_is_least(layout) or self.goodput_is_least(other):
            return None
        seeds = range(min(self.seeds(layout), self.seeds(other)))
        return [
            goodput(self._carried(layout, each)) - goodput(self._carried(other, each))
            for each in (seeds, *([seed] for seed in seeds))
        ]

    def _room(self, layout: Layout) -> float:
        """How much more than its goodput the layout may carry, because no rate in between was tried."""
        return room(self._carried(layout, range(self.seeds(layout))))

    def _error(self, layout: Layout) -> float:
        """Standard deviation of what a single seed carries: anything between two rates that were tried is as likely."""
        rooms = [room(self._carried(layout, [seed])) for seed in range(self.seeds(layout))]
        return sqrt(fmean(each * each for each in rooms) / 12)

    def is_separate(self, best: Layout, other: Layout) -> bool:
        """Whether trials have shown that the other layout carries less: by more than the searches' precision, and with
        all of the interval of the difference between seeds."""
        if (differences := self._differences(best, other)) is None:
            return False
        mean, *singles = differences
        # The precision is asked for on its own, so the interval is not widened by it.
        gain = Figure.of(singles, least=None).moved(mean, None)
        precision = max(self.precision(best), self.precision(other))
        return gain.low is not None and gain.low > 0 and self.carried(best) > precision * self.carried(other)

    def precision(self, layout: Layout) -> float:
        """Of its goodput, which is known."""
        return self._searched[layout].precision

    def _know(self, layout: Layout, rate: float, seeds: int) -> None:
        self._seeds[layout] = max(self._seeds.get(layout, 0), seeds)
        if rate:
            self._rates.setdefault(layout, {})[rate] = None

    def _seeds_of(self, layout: Layout) -> Sequence[int]:
        return range(self._seeds.get(layout, 1))

    def _next(self, layout: Layout, seeds: Sequence[int], start: float, precision: float) -> list[TrialTask]:
        """The trials of the next rate, all seeds; none: the goodput is known."""
        rate = next_rate(self._carried(layout, seeds), start, precision, self._rates.get(layout, ()))
        if rate is None:
            return []
        self._know(layout, rate, 1)
        return [self._task(layout, rate, seed) for seed in seeds]

    def _carried(self, layout: Layout, seeds: Sequence[int]) -> dict[float, bool]:
        """The rates that were tried with these seeds, and whether they are carried on average."""
        found = {}
        for rate in self._rates.get(layout, {}):
            known = [self._trials.known(self._task(layout, rate, seed)) for seed in seeds]
            trials = [trial for trial in known if trial is not None]
            if len(trials) == len(known):
                found[rate] = carried_on_average(trials, self._case.attainment)
        return found

    def _known_checks(self, layout: Layout) -> list[Trial]:
        known = [self._trials.known(task) for task in self._checks(layout)]
        return [trial for trial in known if trial is not None]

    def _checks(self, layout: Layout) -> list[TrialTask]:
        """Whole trials, the first with its result."""
        tasks = [self._task(layout, self.rate, seed) for seed in self._seeds_of(layout)]
        return [replace(task, margin=None, keeps_result=not seed) for seed, task in enumerate(tasks)]

    def _variants(self, layout: Layout, variation: Variation) -> list[TrialTask]:
        seed = self._case.options.seed
        rate = self._varied_rate
        return [TrialTask(layout, rate, LONG, seed + each, None, False, variation) for each in range(SEEDS)]

    def _task(self, layout: Layout, rate: float, seed: int) -> TrialTask:
        return TrialTask(layout, rate, LONG, self._case.options.seed + seed, DECIDES)


def carried_on_average(trials: Sequence[Trial], attainment: float) -> bool:
    """Whether a rate is carried: the shares of rounds and sessions suffice on average over trials of several seeds."""
    return (
        all(trial.is_whole for trial in trials)
        and fmean(trial.met for trial in trials) >= attainment
        and fmean(trial.in_time for trial in trials) >= IN_TIME
    )


def may_be_carried(known: Sequence[Trial], attainment: float, seeds: int) -> bool:
    """Whether a rate can still be carried on average over so many seeds, if further trials miss nothing."""
    further = seeds - len(known)
    return all(trial.is_whole for trial in known) and all(
        sum(shares) + further >= seeds * least - _ROUNDING
        for least, shares in (
            (attainment, [trial.met for trial in known]),
            (IN_TIME, [trial.in_time for trial in known]),
        )
    )
