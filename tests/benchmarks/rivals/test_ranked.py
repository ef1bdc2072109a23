"""Orderings by one number per task: against hand-made queues, and against the definition in exact arithmetic."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.presets import analytic_model
from ampd.policies.base import Run
from ampd.policies.registry import create
from ampd.types import PrefillTask
from tests.ampd.policies import situations
from tests.ampd.policies.ordering.exact_times import MODEL, NOW_S, TP1, pick, task

RANKED = ("edf", "hrrn", "shortest-prefill-first", "jct")

ticks = st.integers(0, 4096).map(lambda n: n / 1024)
tasks = st.builds(task, st.just("t"), st.integers(0, 3000), ticks, st.integers(0, 3000), ticks)
queues = st.lists(tasks, min_size=1, max_size=9)


def rank(policy: str, queued: PrefillTask) -> Fraction:
    """The definition: the least goes first."""
    waited = Fraction(NOW_S) - Fraction(queued.arrival_s)
    seconds = Fraction(MODEL.prefill_s(queued.hist_tokens, queued.incr_tokens, TP1))
    if policy == "edf":
        return Fraction(queued.slo.ttft_s) - waited
    if policy == "hrrn":
        return -((waited + seconds) / seconds) if seconds else Fraction(-(10**9))
    if policy == "shortest-prefill-first":
        return seconds
    return queued.incr_tokens - 1000 * waited


@pytest.mark.parametrize("policy", RANKED)
@settings(max_examples=25)
@given(queue=queues)
def test_the_first_task_of_the_least_rank_runs_and_overtakes_what_is_before_it(
    policy: str, queue: list[PrefillTask]
) -> None:
    chosen = pick(policy, queue)
    ranks = [rank(policy, queued) for queued in queue]
    least = min(ranks)
    assert ranks[chosen.index] == least
    if policy != "hrrn":  # equal quotients may differ in the last bit of a float
        assert chosen.index == ranks.index(least)
    assert chosen.postponed == tuple(range(chosen.index))
    assert chosen.together == ()
    assert isinstance(chosen, Run)


@pytest.mark.parametrize("policy", RANKED)
@settings(max_examples=25)
@given(queue=queues, dice=st.randoms(use_true_random=False))
def test_the_order_of_the_queue_decides_between_equals_only(
    policy: str, queue: list[PrefillTask], dice: random.Random
) -> None:
    shuffled = list(queue)
    dice.shuffle(shuffled)
    picked, picked_shuffled = queue[pick(policy, queue).index], shuffled[pick(policy, shuffled).index]
    assert rank(policy, picked) == rank(policy, picked_shuffled)


@pytest.mark.parametrize("policy", RANKED)
def test_equals_run_in_order_of_arrival(policy: str) -> None:
    assert pick(policy, [task("a", 100), task("b", 100), task("c", 100)]) == Run(0)


def test_edf_runs_what_is_due_first() -> None:
    queue = [task("patient", 10, 2.0, ttft_s=9.0), task("due", 900, 0.5, ttft_s=1.0), task("new", 10, 0.0, ttft_s=1.0)]
    assert pick("edf", queue) == Run(1, (0,))


def test_hrrn_runs_the_short_one_first_until_the_long_one_has_waited_long() -> None:
    # 1 s of prefill that waited 2 s (ratio 3) against 1/16 s that waited 1/4 s (ratio 5) ...
    assert pick("hrrn", [task("long", 1024, 2.0), task("short", 64, 0.25)]) == Run(1, (0,))
    # ... and that waited 1/16 s (ratio 2).
    assert pick("hrrn", [task("long", 1024, 2.0), task("short", 64, 0.0625)]) == Run(0)


def test_hrrn_counts_the_history_in_the_prefill_time() -> None:
    # The same increments and waits; only the history makes the first one longer, so its ratio is lower.
    assert pick("hrrn", [task("deep", 64, 1.0, hist=4096), task("flat", 64, 1.0)]) == Run(1, (0,))


def test_what_takes_no_time_has_waited_for_ever() -> None:
    assert pick("hrrn", [task("old", 1, 60.0), task("nothing", 0, 0.0)]) == Run(1, (0,))


def test_shortest_prefill_is_by_time_and_jct_by_new_tokens() -> None:
    queue = [task("few, far behind", 100, hist=40_000), task("more, at the start", 200)]
    assert pick("shortest-prefill-first", queue) == Run(1, (0,))
    assert pick("jct", queue) == Run(0)


def test_shortest_prefill_is_by_the_model_it_is_given() -> None:
    model = analytic_model("llama-3.1-8b", "h20")
    queue = [task("a", 600), task("b", 500, hist=50_000), task("c", 550)]
    chosen = situations.pick(create("ordering", "shortest-prefill-first"), queue, TP1, model, NOW_S, random.Random(0))
    times = [model.prefill_s(queued.hist_tokens, queued.incr_tokens, TP1) for queued in queue]
    assert chosen.index == times.index(min(times)) == 2
