"""Plans of large clusters: a part is searched, and the whole has figures of several seeds, and uses all GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from planner.layout import whole
from planner.layout.case import PlanCase
from planner.layout.explain import sentences
from planner.layout.goodput_plan import make_goodput_plan
from planner.layout.plan import Wishes
from planner.layout.trial import Trial, TrialTask
from planner.layout.whole import scale_of

from .lab import CASE as LAB_CASE

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
        (checked,) = plan.layouts
        assert checked.layout.gpus == 2
        assert checked.attainment.seeds == 3
        assert checked.simulated["rounds"] > 0
        assert checked.goodput is not None
        assert checked.goodput.mean >= plan.rate > 0
        assert [each.variation.name for each in plan.variations][:2] == ["20 % less load", "20 % more load"]
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
    assert plan.scale == plan.copies == 3
    assert plan.enlarged == 1
    assert plan.carries
    assert not plan.variations, "they would be those of fewer copies"
    assert max(wholes) == plan.layouts[0].layout.gpus == 7
    assert plan.layouts[0].goodput_is_least
    assert "each kind of replica got more." in " ".join(sentences(plan, case, {}))


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
    assert "remain unused, because more replicas are no better in simulations" in " ".join(sentences(plan, case, {}))


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
