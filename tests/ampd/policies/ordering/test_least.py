"""Orderings by one number per task: against hand-made queues, and against the definition in exact arithmetic."""

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel
from ampd.perf.presets import analytic_model
from ampd.policies.base import Pick, Run
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations

TP1 = Parallelism(1)
NOW_S = 64.0
RANKED = ("edf", "hrrn", "shortest-prefill-first", "jct")


class LinearModel(PerformanceModel):
    """One new token takes 1/1024 s, one of history 1/4096 s: times are exact."""

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return incr_tokens / 1024 + hist_tokens / 4096 if incr_tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:
        raise NotImplementedError

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        raise NotImplementedError

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:
        raise NotImplementedError


MODEL: PerformanceModel = LinearModel()


def task(name: str, incr: int, waited_s: float = 0.0, hist: int = 0, ttft_s: float = 1.0) -> PrefillTask:
    return PrefillTask(name, name, hist, incr, NOW_S - waited_s, Slo(ttft_s, 0.1))


def pick(policy: str, queue: Sequence[PrefillTask], now_s: float = NOW_S, **parameters: object) -> Pick:
    return situations.pick(create("ordering", policy, **parameters), queue, TP1, MODEL, now_s, random.Random(0))


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


def test_jct_lets_a_long_task_grow_smaller() -> None:
    queue = [task("long", 3000, 2.5), task("short", 400)]
    assert pick("jct", queue) == Run(1, (0,))
    assert pick("jct", [task("long", 3000, 2.7), queue[1]]) == Run(0)
    assert pick("jct", queue, ageing_tokens_per_s=2000) == Run(0)
    assert pick("jct", [task("long", 3000, 1e6), queue[1]], ageing_tokens_per_s=0) == Run(1, (0,))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 900)), min_size=2, max_size=40),
    st.sampled_from([250.0, 1000.0, 4000.0]),
)
def test_no_task_is_overtaken_by_those_that_come_later_than_its_age_bound(
    arrivals: list[tuple[int, int]], ageing: float
) -> None:
    """One worker under jct, in virtual time: (tokens, milliseconds since the arrival before) of each task."""
    coming: list[PrefillTask] = []
    at_s = 0.0
    for number, (tokens, gap_ms) in enumerate(arrivals):
        at_s += gap_ms / 1000
        coming.append(PrefillTask(str(number), str(number), 0, tokens, at_s, Slo(1, 1)))
    policy = create("ordering", "jct", ageing_tokens_per_s=ageing)
    now_s = 0.0
    waiting: list[PrefillTask] = []
    while coming or waiting:
        now_s = max(now_s, coming[0].arrival_s) if not waiting else now_s
        while coming and coming[0].arrival_s <= now_s:
            waiting.append(coming.pop(0))
        chosen = situations.pick(policy, waiting, TP1, MODEL, now_s, random.Random(0))
        runs = waiting[chosen.index]
        for position in chosen.postponed:
            late = waiting[position]
            assert runs.arrival_s - late.arrival_s <= late.incr_tokens / ageing + 1e-9
        del waiting[chosen.index]
        now_s += MODEL.prefill_s(0, runs.incr_tokens, TP1)


def test_without_ageing_a_long_task_starves() -> None:
    """The bound above is the ageing's, not the queue's: a stream of short tasks holds a long one back for ever."""

    def runs_at(ageing: float) -> int | None:
        policy = create("ordering", "jct", ageing_tokens_per_s=ageing)
        waiting = [PrefillTask("long", "long", 0, 4000, 0.0, Slo(1, 1))]
        for turn in range(200):
            now_s = 0.1 * turn
            waiting.append(PrefillTask(str(turn), str(turn), 0, 100, now_s, Slo(1, 1)))
            chosen = situations.pick(policy, waiting, TP1, MODEL, now_s, random.Random(0))
            if waiting[chosen.index].task_id == "long":
                return turn
            del waiting[chosen.index]
        return None

    assert runs_at(0.0) is None
    assert runs_at(1000.0) == 39  # (4000 - 100) / 1000 = 3.9 s
