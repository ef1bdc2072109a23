"""The whole of a large cluster, checked again after further figures of its part: no plan says what trials refute.

The planner of the part and the trials are made up. What decides, orders and explains is the planner's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from math import inf

import pytest

from planner.layout import whole
from planner.layout.appraisal import Figure, carried_on_average
from planner.layout.case import PlanCase
from planner.layout.explain import headroom_of, sentences, summary
from planner.layout.layout import Layout
from planner.layout.plan import GoodputPlan, Wishes, time_over
from planner.layout.trial import TimeOverError, Trial, TrialTask
from planner.layout.trials import Trials
from planner.layout.whole_again import plan_of_whole

from .lab import CASE
from .made_up import Goodputs, plan_of_part, simulated

SCALE, RATE = 4, 120.0
SPLIT, COLOCATED = Layout(((1, 1),), ((1, 1),)), Layout((), ((1, 2),))
LARGER, LARGEST = Layout(((1, 2),), ((1, 1),)), Layout(((1, 5),), ((1, 4),))

Run = Callable[[Layout, int, int, float], float]
"""What a trial attains: of a layout, the seed, the number of the trial, the rate."""


class PartPlanner:
    """Answers with one set of goodputs of the part's layouts after the other."""

    scale = SCALE

    def __init__(self, answers: Sequence[Goodputs], *, uses_all: bool) -> None:
        self._answers = list(answers)
        self._uses_all = uses_all

    @property
    def lacks_figures(self) -> bool:
        return bool(self._answers)

    def go_on(self, end_s: float, *, with_goodputs: bool) -> GoodputPlan:  # noqa: ARG002
        return self.answer()

    def answer(self) -> GoodputPlan:
        goodputs = self._answers.pop(0)
        return plan_of_part(goodputs, uses_all=self._uses_all, stopped=time_over(60.0) if self._answers else "")


class Planned:
    """A plan, the trials that were made for it, and what is said of it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        answers: Sequence[Goodputs],
        run: Run,
        *,
        uses_all: bool = False,
        gpus: int = 12,
    ) -> None:
        self.case: PlanCase = replace(CASE, rate=RATE, gpus=gpus)
        self.made: dict[tuple[Layout, float, int], Trial] = {}
        number = count(1)

        def trial(task: TrialTask, _case: PlanCase, _end_s: float = inf) -> Trial:
            seed = task.seed - self.case.options.seed
            met = run(task.layout, seed, next(number), task.rate)
            whole = simulated(met)
            made = self.made[task.layout, task.rate, seed] = whole if task.keeps_result else replace(whole, result=None)
            return made

        monkeypatch.setattr(TrialTask, "run", trial)
        planner = PartPlanner(answers, uses_all=uses_all)
        first = planner.answer()
        wishes = Wishes(uses_all, jobs=1, budget_s=1e6)
        with Trials(self.case, 1, 1e6) as trials:
            self.plan = plan_of_whole(self.case, planner, first, wishes, trials)

    @property
    def text(self) -> str:
        return " ".join(sentences(self.plan, self.case, {}))

    def trials_of(self, layout: Layout) -> list[Trial]:
        """At the plan's rate."""
        return [trial for (made, rate, _), trial in self.made.items() if (made, rate) == (layout, self.plan.rate)]


def test_copies_that_carried_are_kept_when_fewer_fail_and_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: Layout, _seed: int, number: int, _rate: float) -> float:
        if number > 6:
            raise TimeOverError
        return 0.97 if layout.gpus >= 36 else 0.5

    assert Planned(monkeypatch, [{LARGEST: None}, {LARGEST: 50.0}], run, gpus=60).plan.carries


def test_a_whole_that_carried_is_kept_when_another_part_fails_and_the_time_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(layout: Layout, _seed: int, number: int, _rate: float) -> float:
        if number > 6:
            raise TimeOverError
        return 0.5 if layout.prefill else 0.97

    assert Planned(monkeypatch, [{COLOCATED: None}, {SPLIT: 40.0, COLOCATED: 60.0}], run, gpus=24).plan.carries


def test_an_alternative_is_judged_by_all_seeds_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: Layout, seed: int, _number: int, _rate: float) -> float:
        return 0.5 if layout.prefill and layout.gpus == 8 and seed else 0.97

    planned = Planned(monkeypatch, [{SPLIT: None}, {COLOCATED: 40.0, SPLIT: 30.0}], run)
    for shown in planned.plan.layouts:
        assert shown.carries_rate == carried_on_average(planned.trials_of(shown.layout), planned.plan.attainment)


def test_a_whole_that_was_not_simulated_carries_what_its_copies_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_layout: Layout, _seed: int, _number: int, _rate: float) -> float:
        raise KeyboardInterrupt

    plan = Planned(monkeypatch, [{COLOCATED: 24.0}], run).plan
    goodput = plan.layouts[0].goodput
    assert goodput is not None
    assert plan.carries == (goodput.mean >= plan.rate)


@pytest.mark.parametrize(
    ("goodputs", "uses_all", "gpus"),
    [({LARGER: 31.0, COLOCATED: 19.0}, False, 12), ({COLOCATED: 30.0, SPLIT: 25.0}, True, 8)],
)
def test_a_short_check_does_not_outdo_long_simulations_of_the_part(
    monkeypatch: pytest.MonkeyPatch, goodputs: Goodputs, uses_all: bool, gpus: int
) -> None:
    planned = Planned(monkeypatch, [goodputs], lambda *_: 0.97, uses_all=uses_all, gpus=gpus)
    for shown in planned.plan.layouts:
        assert shown.goodput is not None
        assert shown.carries_rate == (shown.goodput.mean >= planned.plan.rate * (1 - 1e-9))
        assert shown.is_refuted_by_part == (not shown.carries_rate)


def test_a_first_layout_that_the_part_refutes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned(monkeypatch, [{COLOCATED: 25.0}], lambda *_: 0.97, uses_all=True, gpus=8)
    assert not planned.plan.carries
    assert "carries the rate there" in planned.text
    assert "Long simulations of the part, times 4, show only 100 sessions/s" in planned.text


def test_parts_that_carry_are_not_filled_up_to_a_layout_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: Layout, _seed: int, _number: int, _rate: float) -> float:
        return 0.905 if layout.gpus == 8 else 0.897

    assert Planned(monkeypatch, [{SPLIT: 30.0}], run, uses_all=True).plan.carries


def test_an_alternative_that_carries_comes_before_a_whole_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: Layout, _seed: int, _number: int, rate: float) -> float:
        return 0.85 if layout.prefill and rate > 110 else 0.97

    plan = Planned(monkeypatch, [{SPLIT: 31.0, COLOCATED: 30.0}], run, uses_all=True, gpus=8).plan
    assert plan.carries
    assert plan.layouts[0].attainment.seeds == 3


def test_further_seeds_are_not_outdone_by_one_when_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_layout: Layout, _seed: int, number: int, _rate: float) -> float:
        if number > 7:
            raise TimeOverError
        return 0.5 if number <= 3 else 0.97

    assert Planned(monkeypatch, [{LARGEST: 50.0}], run, gpus=60).plan.layouts[0].attainment.seeds == 3


def test_a_seed_that_ended_before_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes: the second seed ends and fails, then the time is over."""

    def trials(self: Trials, tasks: Sequence[TrialTask]) -> list[Trial]:
        for task in tasks[1:2]:
            self._keep(task, task.run(self.case))
        raise TimeOverError

    monkeypatch.setattr(Trials, "trials", trials)
    planned = Planned(monkeypatch, [{SPLIT: 40.0}], lambda *_: 0.3)
    assert not planned.plan.carries
    assert "was not simulated" not in planned.text


def test_a_lower_bound_below_the_rate_is_no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Planned(monkeypatch, [{SPLIT: 30.0}], lambda *_: 0.97, uses_all=True).plan.layouts[0]
    assert shown.carries_rate
    bound = replace(shown, goodput_is_least=True, goodput=Figure(RATE / 2, None, None, 3))
    assert headroom_of(bound, RATE) is None
    assert headroom_of(replace(bound, carries_rate=False), RATE) == pytest.approx(0.5)


def attains_enough(*_: object) -> float:
    return 0.97


@pytest.mark.parametrize("uses_all", [False, True])
def test_figures_that_come_later_refute_the_first_layout(monkeypatch: pytest.MonkeyPatch, uses_all: bool) -> None:
    answers: list[Goodputs] = [{COLOCATED: None}, {COLOCATED: 25.0}]
    planned = Planned(monkeypatch, answers, attains_enough, uses_all=uses_all, gpus=8)
    assert not planned.plan.carries
    assert "show only 100 sessions/s" in planned.text


def test_figures_that_come_too_late_for_another_check_refute_the_first_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part needs five copies now, and there is no time to simulate them."""

    def run(layout: Layout, _seed: int, _number: int, _rate: float) -> float:
        if layout.gpus > 8:
            raise TimeOverError
        return 0.97

    plan = Planned(monkeypatch, [{COLOCATED: None}, {COLOCATED: 25.0}], run).plan
    assert plan.copies >= 4.8
    assert not plan.is_checked


def test_figures_of_another_part_do_not_refute_the_first_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of it are a part of the first layout, and say nothing of it."""
    planned = Planned(monkeypatch, [{COLOCATED: None}], attains_enough, uses_all=True, gpus=8)
    half = Layout((), ((1, 1),))
    for layout, refuted in ((half, False), (COLOCATED, True)):
        part = plan_of_part({layout: 10.0}, uses_all=True)
        assert whole.contradicts(planned.case, part, planned.plan) == refuted


@pytest.mark.parametrize("goodput", [25.0, 10.0])
def test_replicas_beside_the_parts_do_not_make_up_for_parts_that_carry_much_less(
    monkeypatch: pytest.MonkeyPatch, goodput: float
) -> None:
    planned = Planned(monkeypatch, [{COLOCATED: goodput}], attains_enough, uses_all=True, gpus=9)
    assert planned.plan.filled_gpus == 1
    assert not planned.plan.carries
    assert "the replicas on the GPUs that remained cannot make up for it" in planned.text


def test_replicas_beside_the_parts_may_make_up_for_parts_that_carry_a_little_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Planned(monkeypatch, [{COLOCATED: 28.0}], attains_enough, uses_all=True, gpus=9).plan.carries


def test_a_whole_that_nearly_carries_is_not_replaced_by_parts_that_carry_much_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goodputs = {Layout((), ((1, 3),)): 29.0, COLOCATED: 10.0}
    plan = Planned(monkeypatch, [goodputs], attains_enough, uses_all=True).plan
    assert [each.layout.gpus for each in plan.layouts] == [12, 12]
    assert plan.layouts[0].goodput is not None
    assert plan.layouts[0].goodput.mean == 116.0


def test_the_layout_that_carries_most_is_not_replaced_by_one_of_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "filled", lambda layout, *_: layout)
    plan = Planned(monkeypatch, [{LARGER: 40.0, COLOCATED: 31.0}], attains_enough, uses_all=True).plan
    assert [each.layout.gpus for each in plan.layouts] == [12, 8]


@pytest.mark.parametrize("carries", [False, True])
def test_the_most_goodput_is_not_decided_while_the_first_fails_and_others_are_untried(
    monkeypatch: pytest.MonkeyPatch, carries: bool
) -> None:
    """After three seeds of the first layout, and a lower rate if it fails, the time is over."""

    def run(_layout: Layout, _seed: int, number: int, rate: float) -> float:
        if number > 4 - carries:
            raise TimeOverError
        return 0.5 if rate > 115 and not carries else 0.97

    plan = Planned(monkeypatch, [{SPLIT: 31.0, COLOCATED: 30.0}], run, uses_all=True, gpus=8).plan
    assert len(plan.layouts) == 1
    assert plan.carries == plan.is_decided == carries


def test_a_fuller_layout_that_attains_more_and_fails_is_said_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: Layout, seed: int, _number: int, _rate: float) -> float:
        if layout.gpus == 8:
            return (0.895, 0.93, 0.93)[seed]
        if seed:
            raise TimeOverError
        return 0.897

    planned = Planned(monkeypatch, [{SPLIT: 30.0}], run, uses_all=True, gpus=9)
    assert planned.plan.carries
    assert "no better in simulations: prefill 5xTP1, decode 4xTP1 does not carry the rate" in planned.text


def test_what_an_unchecked_whole_attains_is_said_of_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_layout: Layout, _seed: int, _number: int, _rate: float) -> float:
        raise KeyboardInterrupt

    planned = Planned(monkeypatch, [{COLOCATED: 24.0}], run)
    assert "At 30 sessions/s its part attains 95.0%, and the whole carries up to 120" in planned.text


def test_copies_of_two_parts_that_are_the_same_layout_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas on the GPUs that the second part leaves make it the first one."""
    goodputs = {Layout((), ((1, 2), (2, 1))): 31.0, COLOCATED: 10.0}
    plan = Planned(monkeypatch, [goodputs], attains_enough, uses_all=True, gpus=16).plan
    (shown,) = plan.layouts
    assert shown.carries_rate


def test_a_kept_plan_has_what_is_known_later_of_its_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part's figures refute the alternative, and the layout that the part has first then fails."""
    planned = Planned(
        monkeypatch,
        [{SPLIT: None, COLOCATED: None}, {LARGER: 15.0, COLOCATED: 15.0}],
        lambda layout, *_: 0.5 if dict(layout.prefill).get(1) == 8 else 0.97,
        uses_all=True,
    )
    assert planned.plan.carries
    first, second = planned.plan.layouts
    assert first.layout.prefill
    assert not second.layout.prefill
    assert not second.carries_rate


def test_what_failing_wholes_carry_by_single_simulations_does_not_order_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: Layout, _seed: int, _number: int, rate: float) -> float:
        return 0.97 if rate < (100 if layout.prefill else 110) else 0.5

    planned = Planned(monkeypatch, [{SPLIT: 31.0, COLOCATED: 30.0}], run, uses_all=True, gpus=8)
    first, second = (each.goodput.mean for each in planned.plan.layouts if each.goodput is not None)
    assert first < second
    assert "single short simulations, in steps of 10 %, so they do not order layouts" in planned.text


@pytest.mark.parametrize("gpus", [8, 9])
def test_the_curve_of_a_layout_that_its_part_refutes_says_so(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    planned = Planned(monkeypatch, [{COLOCATED: 25.0}], attains_enough, uses_all=True, gpus=gpus)
    best = planned.plan.layouts[0]
    assert best.is_refuted_by_part
    assert not any(
        best.carries_at(rate, trial, planned.plan.attainment) for rate, trial in best.curve if rate >= planned.plan.rate
    )


def test_the_summary_says_that_the_whole_was_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_layout: Layout, _seed: int, _number: int, _rate: float) -> float:
        raise KeyboardInterrupt

    assert "the whole was not simulated" in summary(Planned(monkeypatch, [{COLOCATED: 24.0}], run).plan)
    assert "simulated" not in summary(Planned(monkeypatch, [{COLOCATED: 30.0}], attains_enough).plan)
