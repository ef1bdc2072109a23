"""Figures over seeds: a mean with its interval, within what is possible."""

from __future__ import annotations

from typing import cast

import pytest

from planner.layout.appraisal import SEEDS, Appraiser, Figure, may_be_carried
from planner.layout.goodput import PRECISION
from planner.layout.layout import Layout
from planner.layout.trial import LONG, Trial, TrialTask
from planner.layout.trials import Trials

from .lab import CASE, MadeAtOnce


def test_an_interval_needs_two_seeds_and_stays_within_what_is_possible() -> None:
    assert Figure.of([0.9]) == Figure(0.9, None, None, 1)
    figure = Figure.of([0.98, 1.0, 0.99], 1.0)
    assert figure.mean == pytest.approx(0.99)
    assert figure.high == 1.0
    assert figure.low is not None
    assert 0.9 < figure.low < 0.99
    assert Figure.of([0.0, 0.1, 0.2]).low == 0.0
    gain = Figure.of([0.0, 0.1, 0.2], least=None)
    assert gain.low is not None
    assert gain.low < 0.0


def test_a_gain_may_be_negative() -> None:
    figure = Figure.of([-0.2, -0.1, -0.3])
    assert figure.mean == pytest.approx(-0.2)
    assert figure.low is not None
    assert figure.low <= figure.mean


class LateSessions:
    """Trials in which nearly all rounds are met, and every tenth session ends too late."""

    def __init__(self) -> None:
        self.asked: list[TrialTask] = []

    def known(self, task: TrialTask) -> Trial:
        self.asked.append(task)
        return Trial(0.99, 0.01, 0.0, 0.9, most=0.99)


def test_other_circumstances_are_judged_as_goodput_is() -> None:
    trials = LateSessions()
    appraiser = Appraiser(CASE, cast(Trials, trials), 2.0)
    found = appraiser.variations(Layout((), ((1, 1),)))
    assert [each.attainment.mean for each in found] == pytest.approx([0.99] * 4)
    assert not any(each.carries for each in found), "sessions count too"
    assert [each.in_time for each in found] == pytest.approx([0.9] * 4)
    assert {(task.horizon, task.margin) for task in trials.asked} == {(LONG, None)}


def test_further_seeds_are_worth_while_only_if_they_can_still_make_up_for_those_that_failed() -> None:
    def trial(met: float, in_time: float) -> Trial:
        return Trial(met, 1 - met, 0.0, in_time)

    assert may_be_carried([trial(0.95, 0.97)], 0.9, 3), "two more in which all sessions are in time"
    assert not may_be_carried([trial(0.95, 0.969)], 0.9, 3)
    assert may_be_carried([trial(0.95, 0.98), trial(0.95, 0.99)], 0.9, 3)
    assert not may_be_carried([trial(0.95, 0.98), trial(0.95, 0.98)], 0.9, 3)
    assert may_be_carried([trial(0.95, 0.98), trial(0.95, 0.98)], 0.9, 6)
    assert not may_be_carried([trial(0.69, 1.0)], 0.9, 3)
    assert not may_be_carried([Trial(0.99, 0.01, 0.0, 1.0, is_whole=False)], 0.9, 3)


class Sharp(MadeAtOnce):
    """Trials of any seed that carry all rates up to a limit, which depends on the layout."""

    def __init__(self, limits: dict[Layout, float]) -> None:
        self.limits = limits
        self.made: dict[TrialTask, Trial] = {}

    def trials(self, tasks: list[TrialTask]) -> list[Trial]:
        return [self.made.setdefault(task, self._trial(task)) for task in tasks]

    def known(self, task: TrialTask) -> Trial | None:
        return self.made.get(task)

    def _trial(self, task: TrialTask) -> Trial:
        met = 0.95 if task.rate <= self.limits[task.layout] else 0.5
        return Trial(met, 1 - met, 0.0, 1.0, most=met)


@pytest.mark.parametrize("limit", [2.0, 2.03, 2.09, 2.19, 1.97])
def test_an_interval_is_not_narrower_than_the_steps_of_the_search(limit: float) -> None:
    best, other = Layout((), ((1, 1),)), Layout((), ((2, 1),))
    appraiser = Appraiser(CASE, cast(Trials, Sharp({best: limit, other: 2.0})), 2.0)
    appraiser.search_goodput([best, other], SEEDS, 2.0)
    found, gain = appraiser.goodput(best), appraiser.gain(best, other)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.mean <= limit < found.high, "all seeds agree, but rates in between were not tried"
    assert found.high - found.low >= found.mean * (PRECISION - 1) / 2
    assert gain is not None
    assert gain.low is not None
    assert gain.high is not None
    assert gain.low < limit - 2.0 < gain.high
