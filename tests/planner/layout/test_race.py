"""The race between layouts that trials cannot tell apart: finer rates and more seeds, as long as they are needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.layout.appraisal import Appraiser
from planner.layout.layout import Layout
from planner.layout.race import _STAGES, _ordered, contenders, race, ranking, tied
from planner.layout.trial import TimeOverError, Trial, TrialTask
from planner.layout.trials import Trials

from .lab import CASE, MadeAtOnce

LAYOUTS = [Layout((), ((1, count),)) for count in (1, 2, 3, 4)]


class Limited(MadeAtOnce):
    """Trials of layouts whose rates have a limit, which differs between seeds."""

    def __init__(self, limits: dict[Layout, float], spread: float = 0.0) -> None:
        self.limits, self.spread = limits, spread
        self.made: dict[TrialTask, Trial] = {}

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        for task in tasks:
            # The seeds of two layouts differ in opposite ways, so they are hard to tell apart.
            sign = (-1) ** (task.seed + LAYOUTS.index(task.layout))
            limit = self.limits[task.layout] * (1 + self.spread * sign)
            met = min(max(CASE.attainment + 0.5 * (1 - task.rate / limit), 0.0), 1.0)
            self.made[task] = Trial(met, 1 - met, 0.0, 1.0, most=met)
        return [self.made[task] for task in tasks]

    def known(self, task: TrialTask) -> Trial | None:
        return self.made.get(task)

    def seeds_of(self, layout: Layout) -> set[int]:
        return {task.seed for task in self.made if task.layout == layout}


class Stopped(Limited):
    """The time is over when a second layout wants this many seeds."""

    def __init__(self, limits: dict[Layout, float], spread: float, most_seeds: int) -> None:
        super().__init__(limits, spread)
        self._most_seeds = most_seeds

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        if len(tasks) >= self._most_seeds and tasks[0].layout != LAYOUTS[0]:
            raise TimeOverError
        return super().trials(tasks)


def raced(trials: Limited) -> tuple[list[Layout], list[Layout]]:
    appraiser = Appraiser(CASE, cast(Trials, trials), 0.0)
    layouts = list(trials.limits)
    appraiser.search_goodput(layouts, 3, 10.0)
    race(appraiser, layouts)
    ranked = ranking(appraiser, layouts)
    return ranked, tied(appraiser, ranked[0], ranked)


def test_layouts_that_are_clearly_apart_get_no_further_seeds() -> None:
    trials = Limited(dict(zip(LAYOUTS, (10.0, 13.0, 8.0), strict=False)))
    ranked, equal = raced(trials)
    assert (ranked[0], equal) == (LAYOUTS[1], [])
    assert all(trials.seeds_of(layout) == {0, 1, 2} for layout in trials.limits)


def test_layouts_within_the_precision_are_told_apart_by_finer_rates_and_further_seeds() -> None:
    trials = Limited(dict(zip(LAYOUTS, (10.0, 10.4, 7.0), strict=False)))
    assert raced(trials)[0][0] == LAYOUTS[1]
    assert len(trials.seeds_of(LAYOUTS[0])) == len(trials.seeds_of(LAYOUTS[1])) > 3
    assert trials.seeds_of(LAYOUTS[2]) == {0, 1, 2}, "it is out of the race"


def test_a_race_that_is_stopped_leaves_what_is_known_with_the_seeds_that_all_have() -> None:
    trials = Stopped(dict(zip(LAYOUTS, (10.2, 10.3), strict=False)), 0.05, most_seeds=6)
    appraiser = Appraiser(CASE, cast(Trials, trials), 0.0)
    appraiser.search_goodput(LAYOUTS[:2], 3, 10.0)
    before = {layout: appraiser.goodput(layout) for layout in LAYOUTS[:2]}
    with pytest.raises(TimeOverError):
        race(appraiser, LAYOUTS[:2])
    assert [appraiser.seeds(layout) for layout in LAYOUTS[:2]] == [6, 3]
    assert appraiser.goodput(LAYOUTS[1]) == before[LAYOUTS[1]]
    ranked = ranking(appraiser, LAYOUTS[:2])
    assert ranked == sorted(LAYOUTS[:2], key=lambda layout: -appraiser.carried(layout, 3))
    assert tied(appraiser, ranked[0], ranked) == ranked[1:]


@example([17.5, 5.0, 5.0, 19.0], 0.1)  # two leave the race with three seeds, by which the others are equal
@given(
    st.lists(st.floats(5.0, 20.0), min_size=2, max_size=4),
    st.sampled_from([0.0, 0.03, 0.1]),
)
def test_the_winner_lacks_no_more_than_the_last_precision(limits: list[float], spread: float) -> None:
    trials = Limited(dict(zip(LAYOUTS, limits, strict=False)), spread)
    found, _ = raced(trials)
    assert sorted(found, key=str) == sorted(trials.limits, key=str)
    # With as many seeds of either sign, the spread of a mean is small.
    assert trials.limits[found[0]] >= max(limits) / (_STAGES[0][1] * (1 + spread / 3 + spread**2))


def test_the_best_is_always_in_the_race() -> None:
    trials = Limited(dict(zip(LAYOUTS, (10.0, 12.0, 12.1), strict=False)), 0.05)
    appraiser = Appraiser(CASE, cast(Trials, trials), 0.0)
    layouts = list(trials.limits)
    appraiser.search_goodput(layouts, 3, 10.0)
    best = max(layouts, key=appraiser.carried)
    assert contenders(appraiser, layouts)[0] == best


def test_layouts_that_no_number_of_seeds_tells_apart_are_tied() -> None:
    ranked, equal = raced(Limited(dict(zip(LAYOUTS, (10.0, 10.0), strict=False)), 0.05))
    assert equal == ranked[1:]


def test_layouts_are_tied_with_the_one_that_is_shown_first_whatever_their_order_by_fewer_seeds() -> None:
    clearly_less, best = LAYOUTS[:2]
    trials = Limited({clearly_less: 8.0, best: 10.0})
    appraiser = Appraiser(CASE, cast(Trials, trials), 0.0)
    appraiser.search_goodput([clearly_less, best], 3, 10.0)
    assert tied(appraiser, best, [clearly_less, best]) == []
    assert tied(appraiser, clearly_less, [clearly_less, best]) == [best], "it carries no less"


def test_what_was_told_apart_stays_so_when_the_winner_is_searched_again() -> None:
    trials = Limited(dict(zip(LAYOUTS, (10.0, 10.35), strict=False)))
    appraiser = Appraiser(CASE, cast(Trials, trials), 0.0)
    appraiser.search_goodput(LAYOUTS[:2], 3, 10.0)
    race(appraiser, LAYOUTS[:2])
    winner, other = ranking(appraiser, LAYOUTS[:2])
    assert appraiser.is_separate(winner, other)
    appraiser.search_goodput([winner], 3, 10.0)
    assert appraiser.precision(winner) < 1.05
    assert tied(appraiser, winner, [winner, other]) == []


@pytest.mark.parametrize("limit", [1e-9, 1e9])
def test_nothing_is_tied_where_no_rate_is_carried_or_none_is_too_high(limit: float) -> None:
    ranked, equal = raced(Limited(dict.fromkeys(LAYOUTS[:2], limit)))
    assert len(ranked) == 2
    assert not equal


@pytest.mark.parametrize("apart", [1.02, 1.3])
def test_a_difference_counts_when_it_is_beyond_the_precision(apart: float) -> None:
    trials = Limited(dict(zip(LAYOUTS, (10.0, 10.0 * apart), strict=False)))
    appraiser = Appraiser(CASE, cast(Trials, trials), 0.0)
    appraiser.search_goodput(LAYOUTS[:2], 3, 10.0)
    assert appraiser.is_separate(LAYOUTS[1], LAYOUTS[0]) == (apart == 1.3)


def test_of_equal_layouts_the_one_with_fewer_roles_comes_first() -> None:
    split, mixed = Layout(((1, 1),), ((1, 1),)), Layout(((1, 1),), ((1, 1),), ((1, 1),))
    carries = SimpleNamespace(carried=lambda *_: 5.0, seeds=lambda _: 3)
    assert _ordered(cast(Appraiser, carries), [mixed, split]) == [split, mixed]
