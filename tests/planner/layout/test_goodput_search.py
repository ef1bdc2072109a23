"""The search by trials, against the trials of every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from ampd.types import Slo
from benchmarks.layout_regret import every_layout
from planner.layout import goodput_search as search_module
from planner.layout.costs import Costs
from planner.layout.goodput_search import Search, centres_of
from planner.layout.layout import Layout
from planner.layout.trial import SHORT, Horizon, Trial, TrialTask
from planner.layout.trials import Trials

from .lab import CASE as LAB_CASE
from .lab import MadeAtOnce

CASE = replace(LAB_CASE, gpus=3)
MUCH = 1e6
"""Seconds; no search takes that long."""


def carrying(rate: float) -> set[Layout]:
    return {
        layout
        for layout in every_layout(CASE.degrees, CASE.gpus)
        if all(TrialTask(layout, rate, horizon, 0).run(CASE).carries(CASE.attainment) for horizon in horizons())
    }


def horizons() -> tuple[Horizon, Horizon]:
    return SHORT, search_module._CONFIRMS["horizon"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("rate", [30.0, 70.0])
def test_no_layout_of_fewer_gpus_carries_the_rate(rate: float) -> None:
    case = replace(CASE, rate=rate)
    with Trials(case, 1, MUCH) as trials:
        search = Search(case, trials)
        search.fewest()
    best = search.carrying[0]
    assert search.best[0] == best
    assert best in carrying(rate)
    assert best.gpus == min(layout.gpus for layout in carrying(rate))


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
def test_other_layouts_of_as_many_gpus_are_found_when_the_first_ones_are_not_enough() -> None:
    case = replace(CASE, rate=90.0)
    with Trials(case, 1, MUCH) as trials:
        search = Search(case, trials)
        search.fewest()
        first = [layout for layout in search.carrying if layout.gpus == search.carrying[0].gpus]
        search.beside(first)
        others = [layout for layout in search.carrying if layout.gpus == first[0].gpus and layout not in first]
    assert others
    assert set(others) < carrying(90.0)


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
def test_kv_memory_that_does_not_keep_idle_sessions_rules_no_layout_out() -> None:
    first, last = LAB_CASE.sessions[0].rounds
    waiting = LAB_CASE.sessions[0].model_copy(update={"rounds": (first, last.model_copy(update={"tool_s": 10.0}))})
    # About 50 sessions of 63 tokens wait for their tools, and a replica keeps 4 of them.
    case = replace(LAB_CASE, sessions=(waiting,), rate=5.0, gpus=12, kv_capacity_tokens={1: 300})
    with Trials(case, 1, MUCH) as trials:
        search = Search(case, trials)
        search.fewest()
    best = search.carrying[0]
    assert best.gpus == 1
    trial = TrialTask(best, case.rate, horizons()[1], 0, keeps_result=True).run(case)
    assert trial.result is not None
    assert trial.result["lost_sessions"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
def test_where_none_carries_the_rate_there_is_still_an_order() -> None:
    case = replace(CASE, slo=Slo(1e-4, 1e-5))
    with Trials(case, 1, MUCH) as trials:
        search = Search(case, trials)
        search.fewest()
        assert not search.carrying
        assert not search.more()
    assert search.best


@pytest.mark.slow
def test_no_layout_carries_more_than_the_one_that_was_found() -> None:
    with Trials(CASE, 1, MUCH) as trials:
        search = Search(CASE, trials)
        search.most()
    assert not carrying(search.rate * 1.25) - set(search.best[:3])


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
def test_what_trials_show_is_fed_back_into_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Layout((), ((1, 1),)), Layout((), ((2, 1),))
    asked: list[bool] = []

    def proposed(costs: Costs, _: int) -> list[Layout]:
        asked.append(costs != search.expected and costs != search.costs)
        return [second] if asked[-1] else [first]

    monkeypatch.setattr(search_module, "proposals", proposed)
    monkeypatch.setattr(search_module, "neighbours", lambda *_: [])
    with Trials(CASE, 1, MUCH) as trials:
        search = Search(CASE, trials)
        search.most()
    assert asked == [False, False, True]
    assert set(search.best) == {first, second}
    assert second in search._most_carried


def test_where_the_fewest_gpus_are_wanted_the_programme_learns_from_layouts_that_fail_and_that_carry_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Costs] = []

    def proposed(costs: Costs, _: int) -> list[Layout]:
        asked.append(costs)
        return []

    monkeypatch.setattr(search_module, "proposals", proposed)
    search = Search(CASE, cast(Trials, None))
    single, double = Layout((), ((1, 1),)), Layout((), ((2, 1),))
    search._proposed(3)
    assert asked == [search.expected, search.costs], "nothing is known"
    search.failed, search.carrying = [double], [single]
    search.case = replace(CASE, rate=search.expected.bound(double) * 0.9)
    assert search.expected.bound(single) < search.case.rate
    search._proposed(3)
    assert asked[2].bound(double) == pytest.approx(search.case.rate)
    assert asked[2].bound(single) == pytest.approx(search.case.rate)
    assert asked[3] == search.costs


class BoundBySessions(MadeAtOnce):
    """Trials in which sessions end too late where the rate is too high. Better layouts meet fewer rounds' targets."""

    def __init__(self) -> None:
        self.made: dict[TrialTask, Trial] = {}

    @staticmethod
    def limit(layout: Layout) -> float:
        return 100.0 + 10.0 * sum(count for group in layout.groups.values() for _, count in group)

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        for task in tasks:
            limit = self.limit(task.layout)
            in_time = min(1.99 - task.rate / limit, 1.0)
            self.made[task] = Trial(1.0 - limit / 10_000, 0.0, 0.0, in_time)
        return [self.made[task] for task in tasks]

    def known(self, task: TrialTask) -> Trial | None:
        return self.made.get(task)

    def show(self, best: str) -> None:
        pass


def test_layouts_are_compared_by_what_binds_them() -> None:
    trials = BoundBySessions()
    search = Search(replace(CASE, gpus=6), cast(Trials, trials))
    search.most()
    most = max(map(trials.limit, every_layout(CASE.degrees, 6)))
    assert trials.limit(search.best[0]) == most
    # The last rate is just above what the best layout carries, because there layouts are told apart best.
    assert most < search.rate < 1.1 * most


def test_neighbours_of_the_best_layouts_of_each_set_of_roles_are_tried() -> None:
    colocated = [Layout((), ((1, count),)) for count in range(8, 2, -1)]
    split = [Layout(((1, count),), ((2, 1),)) for count in (3, 2, 1)]
    found = centres_of([*colocated, *split])
    assert found[:4] == colocated[:4]
    assert found[4:] == split[:2]


class AboveBound(BoundBySessions):
    """Trials of layouts that carry up to a fifth more than their fluid rate. Others carry less than it."""

    def __init__(self, search_bound: Callable[[Layout], float], able: Layout) -> None:
        super().__init__()
        self.bound, self.able = search_bound, able

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        for task in tasks:
            limit = self.bound(task.layout) * (1.2 if task.layout == self.able else 1.1)
            self.made[task] = Trial(min(1.9 - task.rate / limit, 1.0), 0.0, 0.0, 1.0)
        return [self.made[task] for task in tasks]


def test_the_rate_is_raised_above_the_fluid_bound_because_layouts_carry_more() -> None:
    search = Search(CASE, cast(Trials, None))
    best = max(every_layout(CASE.degrees, CASE.gpus), key=search.costs.bound)
    search.expected = search.costs
    search._trials = cast(Trials, AboveBound(search.costs.bound, best))
    search.most()
    assert search.best[0] == best
    assert search.carried_rate > search.costs.bound(best)


class CloseTrials(BoundBySessions):
    """Trials of a layout with these shares of sessions in time, by seed. All of its rounds are met."""

    def __init__(self, in_time: list[float]) -> None:
        super().__init__()
        self.in_time = in_time

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        for task in tasks:
            in_time = self.in_time[task.seed] if task.horizon is horizons()[1] else 1.0
            self.made[task] = Trial(1.0, 0.0, 0.0, in_time)
        return [self.made[task] for task in tasks]


@pytest.mark.parametrize(
    ("in_time", "made", "carries"),
    [
        ([0.99, 0.0, 0.0], 1, True),
        ([0.95, 1.0, 1.0], 1, False),
        ([0.98, 1.0, 1.0], 3, True),
        ([0.98, 1.0, 0.98], 3, False),
        ([0.98, 0.97, 1.0], 2, False),
    ],
)
def test_further_seeds_are_tried_only_while_they_can_change_the_answer(
    in_time: list[float], made: int, carries: bool
) -> None:
    trials = CloseTrials(in_time)
    search = Search(replace(CASE, rate=2.0), cast(Trials, trials))
    layout = Layout((), ((1, 1),))
    search._try([layout])
    assert (layout in search.carrying) == carries
    assert (layout in search.failed) != carries
    assert (layout in search._close) == (not carries and in_time[0] > 0.96)
    assert sum(task.horizon is horizons()[1] for task in trials.made) == made
