"""LAPS: two classes that take turns, batches of shorts, and waits that never cost a deadline."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.perf.presets import analytic_model
from ampd.policies.base import OrderingSituation, Pick, Run, Wait
from ampd.policies.laps import batch_s
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations

TP1 = Parallelism(1)
NOW_S = 64.0
MODEL = analytic_model("llama-3.1-8b", "h20")


def task(name: str, incr: int, waited_s: float = 0.0, ttft_s: float = 1.0, postponed: int = 0) -> PrefillTask:
    return PrefillTask(name, name, 0, incr, NOW_S - waited_s, Slo(ttft_s, 0.1), postponed)


def pick(queue: Sequence[PrefillTask], now_s: float = NOW_S, **parameters: Any) -> Pick:
    return situations.pick(create("ordering", "laps", **parameters), queue, TP1, MODEL, now_s, random.Random(0))


def run(queue: Sequence[PrefillTask], now_s: float = NOW_S, **parameters: Any) -> Run:
    """The pick, after its wait if it waits."""
    chosen = pick(queue, now_s, **parameters)
    if isinstance(chosen, Wait):
        chosen = pick(queue, now_s + chosen.wait_s, **parameters)
    assert isinstance(chosen, Run)
    return chosen


def pass_s(tasks: Sequence[PrefillTask]) -> float:
    situation = OrderingSituation(queue=tasks, parallelism=TP1, model=MODEL, now_s=NOW_S, rng=random.Random(0))
    return batch_s(situation, tasks)


def members(chosen: Pick) -> tuple[int, ...]:
    return (chosen.index, *chosen.together)


tasks = st.builds(
    task,
    st.just("t"),
    st.one_of(st.integers(1, 256), st.integers(1, 2000)),
    st.one_of(st.floats(0, 0.05), st.floats(0, 3)),
    st.one_of(st.floats(0.01, 0.2), st.floats(0.01, 4)),
    st.integers(0, 3),
)
queues = st.lists(tasks, min_size=1, max_size=12)
fresh = st.builds(task, st.just("t"), st.integers(1, 60), st.floats(0, 0.05), st.floats(0.02, 0.6))
fresh_queues = st.lists(fresh, min_size=1, max_size=5)
waiting_parameters = st.fixed_dictionaries(
    {"boundary_tokens": st.just(60), "depth": st.just(6), "max_wait_s": st.floats(0.1, 0.9), "margin_s": st.just(0.004)}
)
parameters = st.fixed_dictionaries(
    {
        "boundary_tokens": st.integers(1, 600),
        "depth": st.integers(1, 6),
        "max_wait_s": st.floats(0, 0.3),
        "margin_s": st.floats(0, 0.01),
    }
)


@pytest.mark.slow
@given(queues, parameters)
def test_a_pass_has_one_class_in_order_of_arrival_and_longs_run_alone(
    queue: list[PrefillTask], parameters: dict[str, Any]
) -> None:
    chosen = run(queue, **parameters)
    positions = members(chosen)
    assert all(0 <= position < len(queue) for position in positions)
    assert all(first < second for first, second in pairwise(positions))
    assert len(positions) <= parameters["depth"]
    classes = [queued.incr_tokens <= parameters["boundary_tokens"] for queued in queue]
    is_short = classes[chosen.index]
    same, other = (
        [position for position, short in enumerate(classes) if short is kind] for kind in (is_short, not is_short)
    )
    assert list(positions) == same[: parameters["depth"] if is_short else 1]
    assert chosen.postponed == tuple(other[:1]), "the first of the class that is passed over, and nobody else"


@pytest.mark.slow
@settings(max_examples=400)
@given(st.one_of(queues, fresh_queues), st.one_of(parameters, waiting_parameters))
def test_it_waits_for_company_only_while_nobody_is_kept_waiting_by_it(
    queue: list[PrefillTask], parameters: dict[str, Any]
) -> None:
    chosen = pick(queue, **parameters)
    if isinstance(chosen, Wait):
        assert chosen.wait_s > 0
        assert all(queued.incr_tokens <= parameters["boundary_tokens"] for queued in queue), "no long task waits"
        assert len(queue) < parameters["depth"]
        until_s = NOW_S + chosen.wait_s
        for queued in queue:
            assert until_s + pass_s(queue) + parameters["margin_s"] <= queued.arrival_s + queued.slo.ttft_s + 1e-9
            assert until_s <= queued.arrival_s + parameters["max_wait_s"] + 1e-9


@pytest.mark.slow
@given(fresh_queues, waiting_parameters)
def test_asked_again_after_its_wait_it_runs(queue: list[PrefillTask], parameters: dict[str, Any]) -> None:
    chosen = pick(queue, **parameters)
    assume(isinstance(chosen, Wait))
    assert isinstance(chosen, Wait)
    again = pick(queue, NOW_S + chosen.wait_s, **parameters)
    assert again == Run(0, (), tuple(range(1, len(queue))))


@pytest.mark.slow
@settings(max_examples=100)
@given(queues, parameters, st.randoms(use_true_random=False))
def test_the_order_within_a_batch_changes_nothing_but_the_order(
    queue: list[PrefillTask], parameters: dict[str, Any], dice: random.Random
) -> None:
    shorts = [queued for queued in queue if queued.incr_tokens <= parameters["boundary_tokens"]]
    assume(shorts)
    assume(len(shorts) <= parameters["depth"])
    shuffled = list(shorts)
    dice.shuffle(shuffled)
    assert members(run(shorts, **parameters)) == members(run(shuffled, **parameters)) == tuple(range(len(shorts)))
    assert pick(shorts, **parameters) == pick(shuffled, **parameters)


def test_while_both_classes_wait_they_take_turns() -> None:
    """Played as the queue plays it: what is postponed is counted, and new tasks of both classes keep coming."""
    dice = random.Random(1)
    waiting = [task(f"{number}", dice.choice([30, 1000])) for number in range(6)]
    classes = []
    for turn in range(60):
        waiting += [task(f"{turn}/{number}", tokens) for number, tokens in enumerate((20, 900, 40))]
        chosen = pick(waiting, depth=3)
        assert isinstance(chosen, Run)
        classes.append({waiting[position].incr_tokens <= 256 for position in members(chosen)})
        for position in chosen.postponed:
            waiting[position] = replace(waiting[position], postponements=waiting[position].postponements + 1)
        waiting = [queued for position, queued in enumerate(waiting) if position not in members(chosen)]
    assert all(len(kinds) == 1 for kinds in classes)
    assert all(earlier != later for earlier, later in pairwise(classes))


def test_the_class_that_came_first_begins() -> None:
    assert pick([task("l", 900), task("s", 10), task("s", 10)]) == Run(0, (1,))
    assert pick([task("s", 10), task("l", 900), task("s", 10)]) == Run(0, (1,), (2,))


def test_long_tasks_alone_run_one_by_one_and_never_wait() -> None:
    assert pick([task("a", 900), task("b", 300), task("c", 5000)]) == Run(0)


@pytest.mark.parametrize(("incr", "is_short"), [(255, True), (256, True), (257, False)])
def test_the_boundary_itself_is_short(incr: int, is_short: bool) -> None:
    chosen = run([task("long", 1000), task("a", incr, postponed=1), task("b", 10, postponed=1)])
    assert members(chosen) == ((1, 2) if is_short else (2,))


def test_a_full_batch_goes_at_once() -> None:
    assert pick([task("s", 10)] * 3, depth=3) == Run(0, (), (1, 2))
    assert pick([task("s", 10)] * 3, depth=4).wait_s > 0


def test_a_single_short_waits_half_of_the_longest_wait_for_company() -> None:
    assert pick([task("s", 10)], max_wait_s=0.25).wait_s == pytest.approx(0.125)
    assert pick([task("s", 10, waited_s=0.1)], max_wait_s=0.25).wait_s == pytest.approx(0.025)
    assert pick([task("s", 10, waited_s=0.13)], max_wait_s=0.25) == Run(0)


def test_the_more_have_come_the_longer_more_are_expected() -> None:
    """Three in 0.15 s are 20 a second: one more in 0.05 s, so at 0.15 of 0.2 s it is just worth to wait."""
    for waited_s, waits in ((0.149, 0.0), (0.148, 0.002), (0.1, 0.05)):
        queue = [task("s", 10, waited_s=waited_s), task("s", 10, waited_s=0.02), task("s", 10)]
        assert pick(queue, max_wait_s=0.2).wait_s == pytest.approx(waits if waits else 0.001, abs=1e-6)
    queue = [task("s", 10, waited_s=0.151), task("s", 10, waited_s=0.02), task("s", 10)]
    assert pick(queue, max_wait_s=0.2) == Run(0, (), (1, 2))


def test_an_urgent_short_ends_the_wait() -> None:
    urgent = task("urgent", 10, ttft_s=0.03)
    relaxed = task("relaxed", 10)
    spare_s = 0.03 - pass_s([relaxed, urgent]) - 0.005
    assert pick([relaxed, relaxed], max_wait_s=0.3).wait_s == pytest.approx(0.2)
    assert pick([relaxed, urgent], max_wait_s=0.3).wait_s == pytest.approx(spare_s * 2 / 3)
    assert pick([relaxed, task("late", 10, waited_s=0.0, ttft_s=0.001)], max_wait_s=0.3) == Run(0, (), (1,))


def test_a_batch_takes_the_time_of_the_captured_bucket_it_fits_into() -> None:
    def alone_s(tokens: int) -> float:
        return MODEL.prefill_s(0, tokens, TP1)

    assert pass_s([task("a", 3)]) == alone_s(8)
    assert pass_s([task("a", 33), task("b", 5), task("c", 9)]) == alone_s(64 * 4)
    assert pass_s([task("a", 256)] * 64) == alone_s(256 * 64)
    assert pass_s([task("a", 257), task("b", 5)]) == alone_s(262), "no bucket: the tokens themselves"
    assert pass_s([task("a", 5)] * 65) == alone_s(5 * 65)
    behind = [PrefillTask("a", "a", 6000, 8, NOW_S, Slo(1, 1)), PrefillTask("b", "b", 0, 4, NOW_S, Slo(1, 1))]
    assert pass_s(behind) == MODEL.prefill_s(4000, 16, TP1)


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"boundary_tokens": 0}, {"max_wait_s": -1}, {"max_wait_s": 2}])
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"ordering policy laps: {next(iter(wrong))}"):
        create("ordering", "laps", **wrong)
