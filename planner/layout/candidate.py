"""A layout with its trials, from which all of its figures are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from planner.layout.layout import Layout
from planner.layout.trial import IN_TIME, Trial

CHOOSING, HELD_OUT = (0, 1, 2), (3, 4, 5)
"""The seeds that choose layouts, and those with which a chosen one is tried again."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The t within which 95 % of Student's distribution lie, for 2, 3, ... values. More than 10 count as 10."""
_LEAST = 0.02
"""A search gives up below this, in units of its start."""
_FIRST_STEP, _LONGEST_STEP = 1.1, 1.6
"""Factors by which the rate is raised or lowered until one rate is carried and a higher one is not."""
_SAME = 1.005
"""Rates that are less than this factor apart are one rate, because a difference between them would be chance."""


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of a mean, by Student's t; infinite with a single value.

    The values are independent and about normal, as results of seeds.
    """
    count = len(values)
    if count == 1:
        return inf
    return _STUDENT[min(count, len(_STUDENT) + 1) - 2] * stdev(values) / sqrt(count)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over seeds with its 95 % interval by Student's t; None: one seed has no interval."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float], mean: float | None = None, most: float = inf) -> Figure:
        """The figure of one value per seed.

        Args:
            mean: another value than their mean.
            most: the interval ends there, and at 0.
        """
        middle, half = fmean(values) if mean is None else mean, half_width(values)
        if not isfinite(half):
            return cls(middle, None, None, len(values))
        return cls(middle, max(middle - half, 0.0), min(middle + half, most), len(values))


@dataclass(slots=True)
class Candidate:
    """A layout and what is known of it.

    A rate is carried if the shares of rounds and of sessions suffice on average over the seeds. Its goodput is the
    highest such rate that was tried.

    Attributes:
        attainment_level: share of the rounds within both targets that carries a rate.
        trials: (sessions per second, seed) -> long trial.
        seeds: those with which its goodput is known; empty: it is not known.
        refused: from this rate on, held-out seeds have shown that it fails.
        first: its short trial at the plan's rate; None: there is none.
        whole: of a large cluster that was planned as copies of a part: the one simulation of all of it.
    """

    layout: Layout
    attainment_level: float
    trials: dict[tuple[float, int], Trial] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    refused: float = inf
    first: Trial | None = None
    whole: Trial | None = None

    def carried(self, seeds: Sequence[int]) -> dict[float, bool]:
        """The rates that were tried with all of these seeds, ascending, and whether they are carried."""
        return {
            rate: rate < self.refused and carried_on_average(trials, self.attainment_level)
            for rate in sorted({rate for rate, _ in self.trials})
            if len(trials := self.trials_at(rate, seeds)) == len(seeds)
        }

    def trials_at(self, rate: float, seeds: Sequence[int]) -> list[Trial]:
        return [self.trials[rate, seed] for seed in seeds if (rate, seed) in self.trials]

    def goodput(self, seeds: Sequence[int]) -> float:
        """The highest rate that it carries with these seeds together; 0: none that was tried."""
        return goodput(self.carried(seeds))

    @property
    def most(self) -> float:
        """The highest rate that it carries with all seeds with which that is known; 0: it is not known, or none."""
        return self.goodput(self.seeds) if self.seeds else 0.0

    def figure(self) -> Figure | None:
        """Its goodput, with an interval over the single seeds; None: it is not known."""
        return Figure.of([self.goodput([seed]) for seed in self.seeds], self.most) if self.seeds else None

    def attainment(self, rate: float) -> Figure:
        """The share of the rounds within both targets at a rate that was tried."""
        return Figure.of([trial.met for trial in self.at(rate)], most=1.0)

    def at(self, rate: float) -> list[Trial]:
        """The trials at the plan's rate: that of the whole cluster, or the long ones, or the short one."""
        if self.whole is not None:
            return [self.whole]
        return self.at_load(rate) or [each for each in [self.first] if each is not None]

    def at_load(self, rate: float) -> list[Trial]:
        """The long trials at any rate, by seed."""
        return [trial for (tried, _), trial in sorted(self.trials.items(), key=_by_key) if tried == rate]

    def simulated(self, rate: float) -> dict[str, Any]:
        """The keys of a simulation's result at the plan's rate.

        Raises:
            ValueError: there is no such trial.
        """
        result = self.at(rate)[0].result
        if result is None:
            raise ValueError(f"no simulation of {self.layout} at {rate} sessions/s was kept")
        return result

    def carries(self, rate: float) -> bool:
        """Whether it carries the plan's rate: by its goodput, or else by the trials at this rate."""
        if self.seeds and self.most < rate:
            return False
        if self.seeds and self.whole is None:
            return True
        return rate < self.refused and carried_on_average(self.at(rate), self.attainment_level)

    def curve(self) -> list[tuple[float, Trial]]:
        """The trials of the first of its seeds by rate, ascending."""
        first = self.seeds[0] if self.seeds else 0
        return [(rate, trial) for (rate, seed), trial in sorted(self.trials.items(), key=_by_key) if seed == first]

    def times(self, layout: Layout, factor: float) -> Candidate:
        """A layout of `factor` times as many replicas, with these trials at as many times their rates."""
        trials = {(rate * factor, seed): trial for (rate, seed), trial in self.trials.items()}
        return replace(self, layout=layout, trials=trials, refused=self.refused * factor)


def carried_on_average(trials: Sequence[Trial], attainment: float) -> bool:
    """Whether a rate is carried: the shares of rounds and sessions suffice on average over trials of several seeds."""
    return (
        bool(trials)
        and all(trial.is_whole for trial in trials)
        and fmean(trial.met for trial in trials) >= attainment
        and fmean(trial.in_time for trial in trials) >= IN_TIME
    )


def _by_key(item: tuple[tuple[float, int], Trial]) -> tuple[float, int]:
    return item[0]


# -- the search for the highest rate that a layout carries


def goodput(carried: Mapping[float, bool]) -> float:
    """The highest rate that is carried, among those below the lowest one that is not; 0: there is none."""
    failing = _lowest_failure(carried)
    return max((rate for rate, carries in carried.items() if carries and rate < failing), default=0.0)


def next_rate(carried: Mapping[float, bool], start: float, most: float, precision: float) -> float | None:
    """The next rate to try; None: the goodput is known.

    Args:
        carried: the rates that were tried, and whether they are carried.
        start: a rate that is about right, which is tried first.
        most: higher rates are not tried, because no layout of this kind carries them.
        precision: the goodput and the next rate that fails are at most this factor apart.
    """
    low, high = goodput(carried), _lowest_failure(carried)
    if low * _SAME < start < high / _SAME:
        return start
    if high == inf:
        rate = low * min(_FIRST_STEP * max(low / start, 1.0), _LONGEST_STEP)
        return rate if rate <= most else None
    if not low:
        return high / (_FIRST_STEP * max(start / high, 1.0)) if high > _LEAST * start else None
    return sqrt(low * high) if high / low > precision else None


def _lowest_failure(carried: Mapping[float, bool]) -> float:
    # Attainment is noisy. A rate that holds above one that fails does not count.
    return min((rate for rate, carries in carried.items() if not carries), default=inf)
