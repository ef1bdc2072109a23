"""Least job completion time: who grows smaller with age, and who starves without it."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.policies.base import Run
from ampd.policies.registry import create
from ampd.types import PrefillTask, Slo
from tests.ampd.policies import situations
from tests.ampd.policies.ordering.exact_times import MODEL, TP1, pick, task


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
