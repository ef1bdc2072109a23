"""Whole plans of a small case: their figures come from the same trials, and a plan that is stopped has layouts too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.layout import goodput_plan
from planner.layout.goodput_plan import Wishes, make_goodput_plan

from .lab import CASE as LAB_CASE

pytestmark = pytest.mark.usefixtures("short_trials")

CASE = replace(LAB_CASE, rate=30.0, gpus=2)
"""Small enough that every layout is tried."""
MUCH = 1e6
"""Seconds; no search takes that long."""


@pytest.mark.slow
def test_all_gpus_carry_the_most_without_a_rate() -> None:
    plan = make_goodput_plan(replace(CASE, rate=0.0), Wishes(jobs=1, budget_s=MUCH))
    best = plan.layouts[0]
    assert best.goodput is not None
    assert 0 < plan.rate <= best.goodput.mean < 1000
    assert [each.goodput.mean if each.goodput else 0.0 for each in plan.layouts[1:]] <= [best.goodput.mean] * 2
    assert best.layout.gpus == CASE.gpus
    assert best.goodput.seeds == best.attainment.seeds == 3
    assert best.goodput.low is not None
    assert best.goodput.low <= best.goodput.mean
    assert [variation.name for variation, _ in plan.variations][:2] == ["20 % less load", "20 % more load"]
    assert plan.next_step is not None
    assert plan.next_step.best.layout.gpus == CASE.gpus + 1
    assert not plan.stopped


def test_a_plan_that_runs_out_of_time_has_a_simulated_layout() -> None:
    plan = make_goodput_plan(CASE, Wishes(jobs=1, budget_s=0.0))
    assert "--budget-s 0" in plan.stopped
    assert plan.layouts
    assert plan.layouts[0].simulated["rounds"] > 0
    assert plan.layouts[0].goodput is None


@pytest.mark.slow
def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(goodput_plan._Planner, "_compare", interrupted)
    plan = make_goodput_plan(CASE, Wishes(jobs=1, budget_s=MUCH))
    assert plan.stopped == "it was interrupted"
    assert plan.trials > 5
    assert all(each.simulated["rounds"] > 0 for each in plan.layouts)
    assert plan.next_step is None
