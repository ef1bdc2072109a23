"""Whole plans of a small case: their figures come from the same trials, and a plan that is stopped has layouts too."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from ampd.types import Slo
from planner.layout import goodput_plan, goodput_search, whole
from planner.layout.appraisal import VARIATIONS, Appraiser, Figure
from planner.layout.case import PlanCase
from planner.layout.explain import sentences
from planner.layout.goodput_plan import make_goodput_plan
from planner.layout.layout import Layout
from planner.layout.plan import INTERRUPTED, GoodputPlan, Wishes
from planner.layout.trial import ONCE, SHORT, TimeOverError, Trial, TrialTask
from planner.layout.trials import Trials

from .lab import CASE as LAB_CASE
from .made_up import simulated

pytestmark = pytest.mark.usefixtures("short_trials")

CASE = replace(LAB_CASE, rate=30.0, gpus=2)
"""Small enough that every layout is tried."""
MUCH = 1e6
"""Seconds; no search takes that long."""


@pytest.mark.slow
def test_all_gpus_carry_the_most_without_a_rate() -> None:
    case = replace(CASE, rate=0.0, gpus=1)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    best = plan.layouts[0]
    assert best.goodput is not None
    assert 0 < plan.rate <= best.goodput.mean < 1000
    assert [each.goodput.mean if each.goodput else 0.0 for each in plan.layouts[1:]] <= [best.goodput.mean] * 2
    assert best.layout.gpus == case.gpus
    assert best.goodput.seeds == best.attainment.seeds == 3
    assert best.goodput.low is not None
    assert best.goodput.low <= best.goodput.mean
    assert [each.variation.name for each in plan.variations][:2] == ["20 % less load", "20 % more load"]
    assert plan.next_step is not None
    assert plan.next_step.best.layout.gpus == case.gpus + 1
    assert not plan.stopped
    assert plan.is_decided


def test_a_plan_that_runs_out_of_time_has_a_simulated_layout() -> None:
    plan = make_goodput_plan(CASE, Wishes(jobs=1, budget_s=0.0))
    assert "--budget-s 0" in plan.stopped
    assert plan.layouts
    assert plan.layouts[0].simulated["rounds"] > 0
    assert plan.layouts[0].goodput is None


@pytest.mark.slow
def test_the_fewest_gpus_that_carry_the_rate_in_long_trials() -> None:
    plan = make_goodput_plan(CASE, Wishes(jobs=1, budget_s=MUCH))
    assert plan.has_fewest_gpus
    assert plan.is_decided
    assert plan.carries
    best = plan.layouts[0]
    assert best.layout.gpus == 1
    assert best.goodput is not None
    assert best.attainment.seeds == best.goodput.seeds == 3
    assert best.goodput.mean >= plan.rate == CASE.rate
    assert plan.next_step is not None
    assert plan.next_step.best.layout.gpus == 2
    assert not plan.stopped
    assert make_goodput_plan(CASE, Wishes(jobs=2, budget_s=MUCH)) == plan


@pytest.mark.slow
def test_where_none_carries_the_rate_the_closest_layouts_are_shown() -> None:
    plan = make_goodput_plan(replace(CASE, slo=Slo(1e-4, 1e-5)), Wishes(jobs=1, budget_s=MUCH))
    assert not plan.carries
    assert not plan.has_fewest_gpus
    assert plan.rate == CASE.rate
    best = plan.layouts[0]
    assert best.attainment.mean < CASE.attainment
    assert best.goodput is not None
    assert best.goodput.mean == 0.0


@pytest.mark.slow
def test_a_rate_far_below_what_is_carried_gives_the_least_and_no_gain() -> None:
    plan = make_goodput_plan(replace(CASE, rate=1.0), Wishes(jobs=1, budget_s=MUCH))
    best = plan.layouts[0]
    assert best.goodput_is_least
    assert best.goodput is not None
    assert best.goodput.mean > plan.rate
    assert best.goodput.low is None
    assert plan.next_step is None


@pytest.mark.slow
def test_without_a_rate_and_with_targets_that_none_meets_the_lowest_rate_that_was_tried_is_shown() -> None:
    case = replace(CASE, slo=Slo(1e-4, 1e-5), rate=0.0)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert not plan.carries
    assert plan.rate == plan.layouts[0].curve[0][0] < 1.0
    assert "carry any rate that was tried" in " ".join(sentences(plan, case, {}))


def test_a_check_is_given_up_when_the_time_is_over() -> None:
    task = TrialTask(Layout((), ((1, 1),)), CASE.rate, ONCE, 0, margin=None)
    with pytest.raises(TimeOverError):
        task.run(CASE, time.monotonic())
    assert task.run(CASE).is_whole


@pytest.mark.slow
@pytest.mark.parametrize("is_worse", [False, True])
def test_gpus_that_are_left_get_replicas_unless_these_carry_less(
    is_worse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, both = Layout((), ((1, 1),)), Layout((), ((1, 2),))
    monkeypatch.setattr(goodput_search, "proposals", lambda *_: [single])
    monkeypatch.setattr(goodput_search, "neighbours", lambda *_: [])
    run = TrialTask.run

    def failing(task: TrialTask, *rest: Any) -> Trial:
        made = run(task, *rest)
        return replace(made, met=0.1) if is_worse and task.layout == both else made

    monkeypatch.setattr(TrialTask, "run", failing)
    case = replace(CASE, rate=0.0, kv_capacity_tokens={1: CASE.kv_capacity_tokens[1]})
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert plan.layouts[0].layout == (single if is_worse else both)
    text = " ".join(sentences(plan, case, {}))
    assert (
        "1 GPU remains unused, because more replicas are no better in simulations: co-located 2xTP1" in text
    ) == is_worse


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "value"), [("_MOST_SHARE", 0.0), ("_FIGURES", 1e9)])
def test_a_plan_whose_comparison_lacks_time_has_all_figures_and_is_not_decided(
    cut: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput_plan, cut, value)
    case = replace(CASE, rate=0.0)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert not plan.is_decided
    assert not plan.stopped
    assert "may choose another one" in " ".join(sentences(plan, case, {}))
    assert len(plan.variations) == len(VARIATIONS)
    assert plan.next_step is not None
    assert plan.layouts[0].goodput is not None
    assert plan.layouts[0].goodput.seeds == 3


@pytest.mark.slow
def test_an_interrupt_of_the_last_comparison_keeps_the_order_of_the_long_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(goodput_plan, "race", interrupted)
    plan = make_goodput_plan(replace(CASE, rate=0.0), Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert plan.stopped == "it was interrupted"
    carried = [each.goodput.mean if each.goodput else 0.0 for each in plan.layouts]
    assert carried == sorted(carried, reverse=True)
    assert plan.rate <= carried[0]
    assert plan.layouts[0].goodput is not None
    assert plan.layouts[0].goodput.seeds == 3


def test_the_variations_of_a_small_cluster_are_of_the_rate_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with Trials(CASE, 1, MUCH) as trials:
        planner = goodput_plan._Planner(CASE, Wishes(), trials)
        planner._shown, planner._has_fewest = [Layout((), ((1, 2),))], True
        monkeypatch.setattr(planner._appraiser, "carried", lambda *_: 2.2 * CASE.rate)
        assert planner._rate_per_copy() == CASE.rate, "although half of the layout should do"
        planner._wishes = Wishes(scale=4)
        assert planner._rate_per_copy() == 2 * CASE.rate


def test_after_an_interrupt_layouts_are_compared_by_the_seeds_that_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    lucky, better = Layout((), ((1, 1),)), Layout((), ((1, 2),))
    goodputs = {lucky: [10.4], better: [10.5, 10.0, 9.5]}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Trials(CASE, 1, MUCH) as trials:
        planner = goodput_plan._Planner(CASE, Wishes(uses_all=True), trials)
        monkeypatch.setattr(planner, "_rate_to_compare", lambda: 10.0)
        monkeypatch.setattr(planner, "_finalists", lambda _: [lucky, better])
        appraiser = planner._appraiser
        monkeypatch.setattr(appraiser, "search_goodput", interrupted)
        monkeypatch.setattr(appraiser, "seeds", lambda layout: len(goodputs[layout]))
        monkeypatch.setattr(appraiser, "carried", lambda layout, seeds=None: fmean(goodputs[layout][:seeds]))
        monkeypatch.setattr(appraiser, "is_separate", lambda *_: False)
        with pytest.raises(KeyboardInterrupt):
            planner._compare()
    assert planner._shown == [better, lucky]


@pytest.mark.parametrize(("rate", "carries"), [(10.0, True), (10.6, False)])
def test_a_goodput_of_long_trials_outdoes_one_short_trial_at_the_rate(
    monkeypatch: pytest.MonkeyPatch, rate: float, carries: bool
) -> None:
    layout = Layout((), ((1, 2),))
    monkeypatch.setattr(TrialTask, "run", lambda *_: simulated(0.5 if carries else 0.97))
    with Trials(CASE, 1, MUCH) as trials:
        planner = goodput_plan._Planner(replace(CASE, rate=rate), Wishes(uses_all=True), trials)
        planner._shown = [layout]
        monkeypatch.setattr(planner._appraiser, "goodput", lambda _: Figure(10.4, None, None, 3))
        plan = planner._plan()
    assert plan.carries == carries
    said = "attains 50.0% in one short simulation, which longer ones outdo, and it carries up to 10.4 sessions/s"
    assert (said in " ".join(sentences(plan, planner._case, {}))) == carries


def test_a_layout_whose_goodput_is_known_is_not_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialTask, "run", lambda *_: simulated(0.97))
    with Trials(CASE, 1, MUCH) as trials:
        planner = goodput_plan._Planner(CASE, Wishes(uses_all=True), trials)
        monkeypatch.setattr(planner, "_undecided", lambda: [Layout((), ((1, 2),))])
        assert planner._plan().is_untried
        monkeypatch.setattr(planner._appraiser, "goodput", lambda _: Figure(CASE.rate, None, None, 3))
        assert not planner._plan().is_untried


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_plan_outlives_one_interrupt_in_the_trial_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, interrupts: int
) -> None:
    left = [KeyboardInterrupt] * interrupts

    def run(*_: object) -> Trial:
        if left:
            raise left.pop()
        return simulated(0.97)

    monkeypatch.setattr(TrialTask, "run", run)
    with Trials(CASE, 1, MUCH) as trials:
        task = TrialTask(Layout((), ((1, 2),)), CASE.rate, SHORT, 0)
        if interrupts == 1:
            assert trials.make(task).met == 0.97
        else:
            with pytest.raises(KeyboardInterrupt):
                trials.make(task)


@pytest.mark.parametrize(("elapsed_s", "tried"), [(70.0, 2), (80.0, 1)])
def test_long_after_the_time_no_larger_layout_is_tried(
    monkeypatch: pytest.MonkeyPatch, elapsed_s: float, tried: int
) -> None:
    made: list[Layout] = []

    def run(task: TrialTask, *_: object) -> Trial:
        made.append(task.layout)
        return simulated(0.5)

    monkeypatch.setattr(TrialTask, "run", run)
    monkeypatch.setattr(Trials, "elapsed_s", elapsed_s)
    with Trials(CASE, 1, 60.0) as trials:
        planner = goodput_plan._Planner(CASE, Wishes(budget_s=60.0), trials)
        smaller, larger = Layout((), ((1, 1),)), Layout((), ((1, 2),))
        monkeypatch.setattr(planner._search, "estimated", lambda: smaller)
        monkeypatch.setattr(planner._search, "enlarged", {smaller: larger, larger: None}.__getitem__)
        planner._undecided()
    assert made == [smaller, larger][:tried]


@pytest.mark.slow
def test_an_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(goodput_plan._Planner, "_compare", interrupted)
    plan = make_goodput_plan(CASE, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert plan.stopped == "it was interrupted"
    assert not plan.is_decided
    assert plan.trials > 5
    assert plan.carries, "the rate is one that was carried, not the one at which the search had arrived"
    assert all(each.simulated["rounds"] > 0 for each in plan.layouts)
    assert plan.next_step is None


@pytest.mark.slow
def test_a_search_that_is_stopped_after_it_found_none_shows_what_carries_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(*_: object) -> None:
        raise TimeOverError

    monkeypatch.setattr(goodput_plan._Planner, "_compare", out_of_time)
    case = replace(CASE, rate=5000.0)
    plan = make_goodput_plan(case, Wishes(jobs=1, budget_s=MUCH))
    assert plan.stopped
    assert not plan.carries
    assert not plan.is_estimated
    assert 0 < plan.carried_rate < case.rate
    text = " ".join(sentences(plan, case, {}))
    assert "No layout of 2 GPUs was found to carry 5000 sessions/s" in text
    assert f"carries {plan.carried_rate:.3g} sessions/s in a short simulation" in text


@pytest.mark.slow
@pytest.mark.parametrize("rate", [30.0, 100.0])
def test_without_time_the_plan_still_carries_the_rate_and_says_that_it_is_a_guess(rate: float) -> None:
    case = replace(CASE, rate=rate, gpus=8)
    plan = make_goodput_plan(case, Wishes(jobs=1, budget_s=0.0))
    assert plan.is_estimated
    assert not plan.has_fewest_gpus
    assert plan.carries
    assert "is a guess with a reserve, and carries the rate" in " ".join(sentences(plan, case, {}))


def test_a_rate_that_a_layout_carries_by_chance_does_not_make_it_the_one_that_carries_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(CASE, rate=100.0, kv_capacity_tokens={1: 200_000, 2: 450_000})
    better, lucky = Layout(((1, 1),), ((1, 1),)), Layout((), ((2, 1),))
    limits = {better: 99.0, lucky: 92.0}

    def run(task: TrialTask, *_: object) -> Trial:
        carries = task.rate <= limits.get(task.layout, 50.0) or (task.layout == lucky and task.rate == case.rate)
        met = 0.95 if carries else 0.86
        return simulated(met)

    monkeypatch.setattr(TrialTask, "run", run)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert plan.layouts[0].layout == better
    assert [each.carries_rate for each in plan.layouts] == [False] * len(plan.layouts)
    assert "No layout of 2 GPUs was found to carry 100 sessions/s" in " ".join(sentences(plan, case, {}))


@pytest.mark.slow
def test_the_goodput_and_whether_the_rate_is_carried_agree() -> None:
    # About what one GPU carries, so that the seeds differ.
    for rate in (50.0, 56.0, 62.0, 68.0):
        plan = make_goodput_plan(replace(CASE, rate=rate), Wishes(jobs=1, budget_s=MUCH))
        for each in plan.layouts:
            assert each.goodput is not None
            assert each.carries_rate == (each.goodput.mean >= rate)


def in_parts(monkeypatch: pytest.MonkeyPatch) -> PlanCase:
    """A case that is planned in parts. Trials are made up: a GPU carries 35 sessions/s, a little less in a split."""

    def run(task: TrialTask, *_: object) -> Trial:
        carried = task.layout.gpus * (32.0 if task.layout.prefill else 35.0)
        met = 0.95 if task.rate * task.variation.rate <= carried else 0.86
        return simulated(met)

    monkeypatch.setattr(whole, "MOST_GPUS", 1)
    monkeypatch.setattr(TrialTask, "run", run)
    return replace(CASE, rate=120.0, gpus=8)


def planned_late(case: PlanCase, monkeypatch: pytest.MonkeyPatch) -> GoodputPlan:
    """A plan that has no time for the figures of its part before the whole is simulated."""
    monkeypatch.setattr(goodput_plan, "_FIGURES_SHARE", 0.0)
    return make_goodput_plan(case, Wishes(jobs=1, budget_s=MUCH))


def test_figures_of_a_part_get_the_time_that_the_check_of_the_whole_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    case = in_parts(monkeypatch)
    early = make_goodput_plan(case, Wishes(jobs=1, budget_s=MUCH))
    late = planned_late(case, monkeypatch)
    assert late.scale > 1
    assert late.stopped == ""
    assert late.is_decided
    assert late.layouts[0].goodput is not None
    assert len(late.layouts) > 1
    assert len(late.variations) == len(VARIATIONS) + 1
    assert late.next_step is not None
    assert late.trials > early.trials, "with the check before the goodput was known"
    assert replace(late, trials=early.trials) == early


def test_the_last_time_gives_figures_that_ask_for_no_further_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(_: object) -> None:
        raise TimeOverError

    case = in_parts(monkeypatch)
    monkeypatch.setattr(goodput_plan._Planner, "_search_goodputs", out_of_time)
    plan = planned_late(case, monkeypatch)
    assert plan.is_checked
    assert plan.layouts[0].goodput is None
    assert len(plan.variations) == len(VARIATIONS) + 1
    assert plan.stopped == "the time was over (--budget-s 1e+06)"
    assert not plan.is_decided, "another layout may need fewer GPUs as a whole"


def test_ctrl_c_while_figures_are_added_keeps_the_check_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    case = in_parts(monkeypatch)
    monkeypatch.setattr(Appraiser, "variation_steps", interrupted)
    plan = planned_late(case, monkeypatch)
    assert plan.is_checked
    assert plan.layouts[0].attainment.seeds == 3
    assert plan.stopped == INTERRUPTED
    assert "once more" not in capsys.readouterr().err


def test_a_search_of_a_part_that_is_cut_names_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = in_parts(monkeypatch)
    monkeypatch.setattr(goodput_plan, "_SEARCH_SHARE", 0.0)
    plan = make_goodput_plan(case, Wishes(jobs=1, budget_s=MUCH))
    assert plan.is_checked
    assert plan.stopped == "the time for the search was over (0% of --budget-s 1e+06)"
