"""Whole plans of a small case: their figures come from the same trials, and a plan that is stopped has layouts too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ampd.types import Slo
from planner.layout import plan as plan_module
from planner.layout.candidate import CHOOSING, HELD_OUT
from planner.layout.layout import Layout
from planner.layout.plan import INTERRUPTED, TIME_OVER, Plan, Wishes, make_plan, scale_of, whole_plan
from planner.layout.trial import ONCE, TimeOverError, TrialTask

from .lab import CASE as LAB_CASE
from .lab import SESSIONS
from .made_up import MadeUpTrials

pytestmark = pytest.mark.usefixtures("short_trials")

CASE = replace(LAB_CASE, rate=30.0, gpus=2)
"""Small enough that every layout is tried."""
MUCH = 1e6
"""Seconds; no search takes that long."""


@pytest.mark.slow
def test_all_gpus_carry_the_most_without_a_rate() -> None:
    case = replace(CASE, rate=0.0, gpus=1)
    plan = make_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    best = plan.layouts[0]
    goodput = best.figure()
    assert goodput is not None
    assert 0 < plan.rate <= goodput.mean
    assert best.layout.gpus == case.gpus
    assert goodput.seeds == best.attainment(plan.rate).seeds == 3
    assert goodput.low is not None
    assert goodput.low <= goodput.mean
    assert len(best.at_load(1.2 * plan.rate)) == 3
    assert not plan.stopped


@pytest.mark.slow
def test_the_fewest_gpus_that_carry_the_rate_whatever_the_number_of_processes() -> None:
    plan = make_plan(CASE, Wishes(jobs=1, budget_s=MUCH))
    assert plan.has_fewest_gpus
    assert plan.carries
    best = plan.layouts[0]
    assert best.layout.gpus == 1
    assert best.seeds == HELD_OUT
    assert len(best.at(plan.rate)) == 6
    assert best.most >= plan.rate == CASE.rate
    assert not plan.stopped
    assert make_plan(CASE, Wishes(jobs=2, budget_s=MUCH)) == plan


@pytest.mark.parametrize("rate", [0.0, 30.0])
def test_targets_that_no_layout_meets_give_no_layout(rate: float) -> None:
    plan = make_plan(replace(CASE, slo=Slo(1e-4, 1e-5), rate=rate), Wishes(uses_all=not rate, jobs=1, budget_s=MUCH))
    assert plan.layouts == []
    assert not plan.carries
    assert not plan.stopped


@pytest.mark.parametrize("uses_all", [False, True])
def test_a_plan_that_runs_out_of_time_has_a_simulated_layout(uses_all: bool) -> None:
    plan = make_plan(CASE, Wishes(uses_all=uses_all, jobs=1, budget_s=0.0))
    assert plan.stopped == TIME_OVER
    assert plan.trials == 1
    (best,) = plan.layouts
    assert best.simulated(plan.rate)["rounds"] > 0
    assert best.figure() is None


def test_a_trial_is_given_up_when_the_time_is_over() -> None:
    task = TrialTask(Layout((), ((1, 1),)), CASE.rate, ONCE, 0, margin=None)
    with pytest.raises(TimeOverError):
        task.run(CASE, time.monotonic())
    assert task.run(CASE).is_whole


def by_gpus(layout: Layout, _: int) -> float:
    return 5.0 * layout.gpus


def planned(monkeypatch: pytest.MonkeyPatch, trials: MadeUpTrials, wishes: Wishes, **changes: Any) -> Plan:
    """A plan of a larger case by made-up trials."""

    class Entered:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> MadeUpTrials:
            return trials

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(plan_module, "Trials", Entered)
    return make_plan(replace(LAB_CASE, sessions=SESSIONS, **{"rate": 20.0, "gpus": 8} | changes), wishes)


def test_what_was_found_until_the_time_was_over_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MadeUpTrials(by_gpus)
    full = planned(monkeypatch, whole, Wishes())
    assert not full.stopped
    assert full.layouts[0].layout.gpus == 4
    for most in (0, 1, 20, whole.made // 2, whole.made - 1):
        plan = planned(monkeypatch, MadeUpTrials(by_gpus, most), Wishes())
        assert plan.stopped == TIME_OVER
        assert plan.layouts
        assert all(each.at(plan.rate) for each in plan.layouts)
        assert plan.layouts[0].layout.gpus >= 4


def test_ctrl_c_ends_the_search_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(MadeUpTrials):
        def run(self, tasks: Any) -> Iterator[Any]:
            for each in super().run(tasks):
                if self.made > 30:
                    raise KeyboardInterrupt
                yield each

    plan = planned(monkeypatch, Interrupted(by_gpus), Wishes(uses_all=True))
    assert plan.stopped == INTERRUPTED
    assert plan.layouts[0].attainment(plan.rate).mean > 0


def test_where_none_carries_the_rate_the_closest_layouts_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, MadeUpTrials(by_gpus), Wishes(), gpus=3)
    assert not plan.carries
    assert not plan.has_fewest_gpus
    assert plan.rate == 20.0
    assert plan.layouts[0].most == pytest.approx(15.0, rel=0.03)
    assert plan.layouts[0].attainment(20.0).mean == pytest.approx(0.675)


def test_a_layout_that_was_refuted_does_not_count_as_carrying(monkeypatch: pytest.MonkeyPatch) -> None:
    lucky = MadeUpTrials(lambda _, seed: 20.5 if seed in CHOOSING else 19.0)
    plan = planned(monkeypatch, lucky, Wishes(), gpus=3)
    assert not plan.carries
    assert all(each.most < 20.0 for each in plan.layouts)


def test_a_large_cluster_is_copies_of_a_part_and_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = MadeUpTrials(by_gpus)
    plan = planned(monkeypatch, trials, Wishes(uses_all=True), rate=0.0, gpus=50)
    assert plan.scale == 3
    best, *others = plan.layouts
    assert 48 <= best.layout.gpus <= 50
    assert [task.layout for task in trials.tasks if task.layout.gpus > 17] == [best.layout]
    assert trials.tasks[-1].rate == plan.rate
    assert best.most == pytest.approx(3 * 5.0 * 16, rel=0.03)
    assert best.whole is not None
    assert best.attainment(plan.rate).seeds == 1
    assert all(each.layout.gpus <= 48 and len(each.at(plan.rate)) == 3 for each in others)


def test_a_whole_that_was_not_simulated_has_the_figures_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    part = planned(monkeypatch, MadeUpTrials(by_gpus), Wishes())
    case = replace(LAB_CASE, sessions=SESSIONS, rate=60.0, gpus=50)
    late: Any = MadeUpTrials(by_gpus, 0)
    whole = whole_plan(case, part, 3, late)
    assert whole.stopped == TIME_OVER
    assert whole.layouts[0].whole is None
    assert whole.layouts[0].attainment(60.0) == part.layouts[0].attainment(20.0)
    assert whole.carries
    failing: Any = MadeUpTrials(lambda *_: 50.0)
    assert not whole_plan(case, part, 3, failing).carries


@pytest.mark.parametrize(("gpus", "rate", "scale"), [(24, 0.0, 1), (25, 0.0, 2), (1024, 0.0, 43), (1024, 20.0, 1)])
def test_layouts_of_more_than_24_gpus_are_searched_as_a_part(gpus: int, rate: float, scale: int) -> None:
    case = replace(LAB_CASE, sessions=SESSIONS, rate=rate, gpus=gpus)
    assert scale_of(case, uses_all=not rate) == scale
