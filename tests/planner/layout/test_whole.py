"""Plans of large clusters: a part is searched, and the whole has figures of several seeds, and uses all GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from math import inf

import pytest

from planner.layout import whole
from planner.layout.appraisal import Figure
from planner.layout.case import PlanCase
from planner.layout.explain import sentences
from planner.layout.goodput_plan import make_goodput_plan
from planner.layout.layout import Layout
from planner.layout.plan import INTERRUPTED, GoodputPlan, Wishes
from planner.layout.trial import TimeOverError, Trial, TrialTask
from planner.layout.trials import Trials
from planner.layout.whole import scale_of

from .lab import CASE as LAB_CASE
from .made_up import plan_of_part, simulated

pytestmark = pytest.mark.usefixtures("short_trials")

CASE = replace(LAB_CASE, rate=30.0, gpus=2)
MUCH = 1e6
"""Seconds; no search takes that long."""


@pytest.mark.parametrize(
    ("gpus", "degrees", "scale"),
    [(24, (1, 8), 1), (25, (8,), 1), (25, (1, 2, 4, 8), 1), (40, (8,), 2), (100, (4, 8), 4), (1024, (1, 8), 64)],
)
def test_parts_leave_few_gpus_even_if_all_replicas_have_the_largest_degree(
    gpus: int, degrees: Sequence[int], scale: int
) -> None:
    case = replace(CASE, gpus=gpus, kv_capacity_tokens=dict.fromkeys(degrees, 1000))
    assert scale_of(case, uses_all=True) == scale
    largest = max(degrees)
    assert gpus - gpus // scale // largest * largest * scale < 9


@pytest.mark.slow
def test_a_large_cluster_is_planned_in_parts_and_has_figures_of_several_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "MOST_GPUS", 1)
    case = replace(CASE, kv_capacity_tokens={1: 200_000})
    assert scale_of(case, uses_all=False) == 1  # One GPU is enough for the rate.
    assert scale_of(case, uses_all=True) == 2
    # Without a rate too: it is what the cluster carries.
    for rate in (case.rate, 0.0):
        plan = make_goodput_plan(replace(case, rate=rate), Wishes(uses_all=True, jobs=1, budget_s=MUCH))
        assert plan.scale == 2
        checked, *_ = plan.layouts
        assert checked.layout.gpus == 2
        assert checked.attainment.seeds == 3
        assert checked.simulated["rounds"] > 0
        assert checked.goodput is not None
        assert checked.goodput.mean >= plan.rate > 0
        assert [each.variation.name for each in plan.variations][:2] == ["as planned", "20 % less load"]
        assert rate in {plan.rate, 0.0}
    assert plan.next_step is not None
    assert plan.next_step.more_gpus == 2
    text = " ".join(sentences(plan, case, {}))
    assert "simulated with 3 seeds" in text
    assert "is known from long simulations of the part, times 2" in text


@pytest.mark.slow
def test_a_large_cluster_that_does_not_carry_what_its_part_does_is_enlarged(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, rate=150.0, gpus=8)
    wholes = failing_up_to(6, monkeypatch)
    plan = make_goodput_plan(case, Wishes(jobs=1, budget_s=MUCH))
    assert plan.scale == 3
    assert plan.copies > 3
    assert plan.is_enlarged
    assert plan.carries
    assert not plan.variations, "they would be those of fewer copies"
    assert plan.layouts[0].layout.gpus == 7
    assert wholes.count(7) >= 3
    assert "fewer would do, but they did not in simulations of the whole" in " ".join(sentences(plan, case, {}))


def failing_up_to(gpus: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes simulations of whole clusters fail if they have at most so many GPUs; returns the GPUs of all of them."""
    run = TrialTask.run
    wholes: list[int] = []

    def failing(task: TrialTask, case: PlanCase, end_s: float = inf) -> Trial:
        made = run(task, case, end_s)
        if task.layout.gpus < 4:
            return made  # Of the part.
        wholes.append(task.layout.gpus)
        return replace(made, met=0.5) if task.layout.gpus <= gpus else made

    monkeypatch.setattr(whole, "MOST_GPUS", 1)
    monkeypatch.setattr(TrialTask, "run", failing)
    return wholes


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 4, 5])
def test_a_large_cluster_has_no_more_copies_of_its_part_than_simulations_show_to_suffice(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASE, rate=120.0, gpus=8)
    wholes = failing_up_to(failing, monkeypatch)
    plan = make_goodput_plan(case, Wishes(jobs=1, budget_s=MUCH))
    best = plan.layouts[0]
    first = wholes[0]
    assert plan.carries
    assert plan.copies * 2 == best.layout.gpus == max(first, failing + 1)
    assert plan.scale * 2 == 6, "as many GPUs as without this search"
    assert best.goodput is not None
    assert best.goodput.mean >= plan.rate
    assert bool(plan.variations) == (best.layout.gpus == first), "they are known for the number that should do"
    assert ("The part carries more than its share" in " ".join(sentences(plan, case, {}))) == (plan.copies < plan.scale)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_without_the_check_of_a_large_cluster_the_figures_are_those_of_its_part(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrialTask.run

    def interrupted(task: TrialTask, case: PlanCase, end_s: float = inf) -> Trial:
        if end_s < inf:
            raise KeyboardInterrupt
        return run(task, case)

    monkeypatch.setattr(whole, "MOST_GPUS", 1)
    if is_interrupted:
        monkeypatch.setattr(TrialTask, "run", interrupted)
    plan = make_goodput_plan(replace(CASE, gpus=4), Wishes(uses_all=True, jobs=1, budget_s=0.0))
    (part,) = plan.layouts
    assert not plan.is_checked
    assert "--budget-s 0" in plan.stopped
    assert (plan.scale, plan.rate, part.layout.gpus, part.goodput) == (2, CASE.rate, 4, None)
    assert part.simulated["rounds"] > 0


@pytest.mark.slow
def test_gpus_beside_the_parts_get_replicas_too_unless_simulations_show_that_it_is_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(CASE, gpus=5)
    run = TrialTask.run
    worst: list[int] = []

    def failing(task: TrialTask, case: PlanCase, end_s: float = inf) -> Trial:
        made = run(task, case, end_s)
        return replace(made, met=0.1) if task.layout.gpus in worst else made

    monkeypatch.setattr(whole, "MOST_GPUS", 1)
    monkeypatch.setattr(TrialTask, "run", failing)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert (plan.scale, plan.filled_gpus, plan.layouts[0].layout.gpus) == (2, 1, 5)
    assert "The 1 GPU that remained got further replicas" in " ".join(sentences(plan, case, {}))
    worst.append(5)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert (plan.filled_gpus, plan.layouts[0].layout.gpus) == (0, 4)
    assert "remains unused, because more replicas are no better in simulations" in " ".join(sentences(plan, case, {}))


@pytest.mark.slow
def test_a_large_cluster_that_cannot_carry_the_rate_shows_what_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, rate=150.0, gpus=4)
    run = TrialTask.run

    def failing(task: TrialTask, case: PlanCase, end_s: float = inf) -> Trial:
        made = run(task, case, end_s)
        return replace(made, met=0.5) if task.layout.gpus == 4 and task.rate > 120.0 else made

    monkeypatch.setattr(whole, "MOST_GPUS", 1)
    monkeypatch.setattr(TrialTask, "run", failing)
    plan = make_goodput_plan(case, Wishes(uses_all=True, jobs=1, budget_s=MUCH))
    assert not plan.carries
    found = plan.layouts[0].goodput
    assert found is not None
    assert 0 < found.mean <= 120.0
    assert "found by such short checks too" in " ".join(sentences(plan, case, {}))


ALTERNATIVES = Layout(((1, 1),), ((1, 1),)), Layout((), ((1, 2),))


def planned_with(
    goodputs: dict[Layout, float],
    monkeypatch: pytest.MonkeyPatch,
    *,
    wholes_fail: Callable[[Layout], bool] = lambda _: False,
    uses_all: bool = False,
    stopped: str = "",
    gpus: int = 12,
    outcome: Callable[[Layout, int, int], float] | None = None,
) -> GoodputPlan:
    """A plan of 120 sessions/s, of whose quarter the best layouts and their goodputs are given.

    `outcome`: attainment of a whole layout by its seed, from 0, and the number of the simulation, from 1.
    """
    case = replace(CASE, rate=120.0, gpus=gpus)
    made = count(1)

    def run(task: TrialTask, _case: PlanCase, _end_s: float = inf) -> Trial:
        if outcome is not None:
            met = outcome(task.layout, task.seed - case.options.seed, next(made))
        else:
            met = 0.5 if wholes_fail(task.layout) else 0.97
        return simulated(met)

    monkeypatch.setattr(TrialTask, "run", run)
    part = plan_of_part(goodputs, uses_all=uses_all, stopped=stopped)
    with Trials(case, 1, MUCH) as trials:
        return whole.whole_plan(case, part, 4, Wishes(uses_all, jobs=1, budget_s=MUCH), trials)


def test_alternatives_of_a_large_cluster_have_as_many_copies_as_carry_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    split, colocated = ALTERNATIVES
    plan = planned_with({split: 40.0, colocated: 24.0}, monkeypatch, wholes_fail=lambda _: False)
    best, other = plan.layouts
    assert (best.layout, plan.copies) == (Layout(((1, 3),), ((1, 3),)), 3.0)
    assert best.attainment.seeds == 3
    assert plan.variations
    assert other.layout == Layout((), ((1, 10),)), "5 copies, more than the scale"
    assert other.attainment == Figure(0.97, None, None, 1)
    assert other.carries_rate
    assert other.goodput is not None
    assert other.goodput.mean == pytest.approx(120.0)
    assert [rate for rate, _ in other.curve] == [120.0, 150.0], "the rates of the part, and the whole's own"


def test_an_alternative_that_needs_fewer_gpus_in_simulations_of_the_whole_becomes_the_best_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split, colocated = ALTERNATIVES
    plan = planned_with({split: 40.0, colocated: 39.0}, monkeypatch, wholes_fail=lambda each: each.prefill != ())
    best, *_ = plan.layouts
    assert best.layout == Layout((), ((1, 7),))
    assert best.attainment.seeds == 3
    assert plan.carries
    assert not plan.variations, "they are those of the other layout"


def test_fewer_gpus_are_no_reason_where_no_layout_carries_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    split, colocated = Layout(((1, 2),), ((1, 1),)), ALTERNATIVES[1]
    plan = planned_with({split: 40.0, colocated: 40.0}, monkeypatch, wholes_fail=lambda _: True)
    best, other = plan.layouts
    assert best.layout.prefill
    assert not other.layout.prefill
    assert not plan.carries
    assert best.layout.gpus > other.layout.gpus


def test_a_check_that_is_stopped_keeps_the_alternatives_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(layout: Layout) -> bool:
        if not layout.prefill:
            raise KeyboardInterrupt
        return False

    split, colocated = ALTERNATIVES
    plan = planned_with({split: 40.0, colocated: 39.0}, monkeypatch, wholes_fail=stopped)
    assert [each.layout for each in plan.layouts] == [Layout(((1, 3),), ((1, 3),))]
    assert plan.is_checked
    assert plan.stopped == "it was interrupted"


def test_after_an_interruption_one_line_says_that_the_whole_is_simulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split, colocated = ALTERNATIVES
    goodputs = {split: 40.0, colocated: 39.0}
    planned_with(goodputs, monkeypatch, wholes_fail=lambda _: False)
    assert "once more" not in capsys.readouterr().err
    for uses_all in (False, True):
        plan = planned_with(goodputs, monkeypatch, uses_all=uses_all, stopped=INTERRUPTED)
        assert capsys.readouterr().err.count("simulating the best layout once more, on all") == 1
        assert [each.attainment.seeds for each in plan.layouts] == [1]
        assert plan.is_decided == uses_all, "an alternative with fewer GPUs would be the best layout"


def test_alternatives_for_the_most_goodput_are_ordered_by_the_goodput_that_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, more, less = Layout((), ((1, 2),)), Layout(((1, 1),), ((1, 1),)), Layout((), ((2, 1),))
    goodputs = {first: 40.0, less: 36.0, more: 38.0}
    plan = planned_with(goodputs, monkeypatch, wholes_fail=lambda _: False, uses_all=True)
    shown = [each.goodput.mean for each in plan.layouts if each.goodput is not None]
    assert shown == [160.0, 152.0, 144.0]


def test_replicas_beside_the_parts_leave_the_limit_of_the_parts_known(monkeypatch: pytest.MonkeyPatch) -> None:
    split, _ = ALTERNATIVES
    plan = planned_with({split: 40.0}, monkeypatch, uses_all=True)
    (best,) = plan.layouts
    assert best.layout.gpus > 8
    assert best.unfilled is not None
    assert best.unfilled.layout.gpus == 8
    assert best.unfilled.goodput == Figure(160.0, 160.0, 160.0, 3)
    assert "it carries up to 160 (160 to 160, 3 seeds) sessions/s" in " ".join(sentences(plan, CASE, {}))
    failing = planned_with({split: 40.0}, monkeypatch, uses_all=True, wholes_fail=lambda _: True)
    assert failing.layouts[0].unfilled is None


def ending_after(simulations: int, met: float, error: type[BaseException]) -> Callable[[Layout, int, int], float]:
    """So many simulations attain `met`. Then an error ends them."""

    def outcome(_layout: Layout, _seed: int, number: int) -> float:
        if number > simulations:
            raise error
        return met

    return outcome


@pytest.mark.parametrize("end", [TimeOverError, KeyboardInterrupt])
def test_a_whole_that_failed_is_shown_as_failed_where_more_copies_were_not_simulated(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned_with({ALTERNATIVES[0]: 30.0}, monkeypatch, outcome=ending_after(3, 0.5, end))
    best = plan.layouts[0]
    assert not plan.carries
    assert (best.attainment.mean, best.attainment.seeds, best.goodput) == (0.5, 3, None)
    assert plan.is_checked
    assert plan.stopped
    assert not plan.is_decided
    text = " ".join(sentences(plan, CASE, {}))
    assert f"More copies, which may carry it, were not simulated, because {plan.stopped}" in text
    assert "The search itself was complete" not in text


def test_copies_that_carry_the_rate_are_kept_where_fewer_were_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(layout: Layout, _seed: int, _number: int) -> float:
        if 22 < layout.gpus < 24:
            raise TimeOverError
        return 0.97 if layout.gpus >= 24 else 0.5

    part = Layout(((1, 5),), ((1, 4),))
    plan = planned_with({part: 60.0}, monkeypatch, outcome=outcome, gpus=60)
    assert plan.carries
    assert plan.layouts[0].layout.gpus >= 24
    assert "Fewer copies, which may do, were not simulated" in " ".join(sentences(plan, CASE, {}))


def test_a_whole_cluster_that_failed_stays_so_where_the_filled_one_was_not_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = ending_after(3, 0.5, TimeOverError)
    plan = planned_with({ALTERNATIVES[0]: 40.0}, monkeypatch, outcome=outcome, uses_all=True)
    best = plan.layouts[0]
    assert not plan.carries
    assert (best.attainment.mean, best.attainment.seeds, best.layout.gpus) == (0.5, 3, 8)
    assert plan.is_checked
    assert plan.stopped
    assert not plan.is_decided


def test_an_alternative_that_several_seeds_refute_has_as_many_copies_as_they_show_to_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def outcome(layout: Layout, seed: int, _number: int) -> float:
        least = 6 if seed == 0 and not layout.prefill else 8
        return 0.97 if layout.gpus >= least else 0.5

    split, colocated = ALTERNATIVES
    plan = planned_with({split: 30.0, colocated: 40.0}, monkeypatch, outcome=outcome)
    best, other = plan.layouts
    assert best.layout.prefill
    assert plan.carries
    assert (other.layout, other.attainment.seeds, other.carries_rate) == (Layout((), ((1, 8),)), 3, True)
    assert "by one simulation or several of the whole each" in " ".join(sentences(plan, CASE, {}))


@pytest.mark.parametrize("refuted", [False, True])
def test_an_alternative_does_not_become_the_best_layout_by_fewer_seeds(
    refuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(layout: Layout, seed: int, _number: int) -> float:
        if layout.prefill or not (seed or layout.gpus > 6):
            return 0.97
        if refuted and layout.gpus == 6:
            return 0.5
        raise TimeOverError

    split, colocated = ALTERNATIVES
    plan = planned_with({split: 30.0, colocated: 40.0}, monkeypatch, outcome=outcome)
    best, *others = plan.layouts
    assert best.layout.prefill
    assert best.attainment.seeds == 3
    assert [each.layout.gpus for each in others] == ([] if refuted else [6])
    assert plan.stopped
    assert not plan.is_decided


def test_seeds_and_lower_rates_that_lack_time_are_no_simulations_that_came_to_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = planned_with({ALTERNATIVES[0]: 40.0}, monkeypatch, outcome=ending_after(1, 0.97, TimeOverError))
    assert seeds.carries
    assert seeds.layouts[0].attainment.seeds == 1
    lowered = planned_with({ALTERNATIVES[0]: 29.0}, monkeypatch, outcome=ending_after(3, 0.5, TimeOverError))
    assert not lowered.carries
    assert lowered.layouts[0].goodput is None
    for plan in (seeds, lowered):
        assert "--budget-s" in plan.stopped
    assert not seeds.is_decided
    assert lowered.is_decided
