"""Figures over seeds: a mean with its interval, within what is possible."""

from __future__ import annotations

from typing import cast

import pytest

from planner.layout.appraisal import Appraiser, Figure, may_be_carried
from planner.layout.layout import Layout
from planner.layout.trial import LONG, Trial, TrialTask
from planner.layout.trials import Trials

from .lab import CASE


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
