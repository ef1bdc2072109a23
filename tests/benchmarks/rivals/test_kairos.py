"""Kairos' order: the least slack among the prefills that can still be on time."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.base import Run
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN


def waiting(incr: int, arrival_s: float = 0.0, ttft_s: float = 1.0) -> PrefillTask:
    """`PLAIN` takes 10 ms and 1 ms a token."""
    return PrefillTask("t", "s", 0, incr, arrival_s, Slo(ttft_s, 0.04))


def pick(*queue: PrefillTask, now_s: float = 0.0) -> tuple[int, tuple[int, ...]]:
    policy = create("ordering", "kairos")
    run = situations.pick(policy, queue, Parallelism(), PLAIN, now_s, random.Random(0))
    assert isinstance(run, Run)
    assert run.together == ()
    return run.index, run.postponed


def test_the_least_slack_runs() -> None:
    # Slack of 890, 490 and 390 ms.
    assert pick(waiting(100), waiting(500), waiting(100, ttft_s=0.5)) == (2, (0, 1))
    assert pick(waiting(100), waiting(500)) == (1, (0,))
    assert pick(waiting(100), waiting(100, arrival_s=-0.1)) == (1, (0,))


def test_equal_ones_run_in_order_of_arrival() -> None:
    assert pick(waiting(100), waiting(100)) == (0, ())


def test_what_is_late_anyway_yields_and_runs_in_order_of_arrival_when_it_is_alone() -> None:
    assert pick(waiting(1000), waiting(100)) == (1, (0,))
    assert pick(waiting(100, arrival_s=-2.0), waiting(900), now_s=0.0) == (1, (0,))
    assert pick(waiting(2000), waiting(1000)) == (0, ())
    assert pick(waiting(990)) == (0, ()), "on time to the millisecond"


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(-3, 0)), min_size=1, max_size=8))
def test_one_that_can_be_on_time_runs_if_there_is_any(drawn: list[tuple[int, float]]) -> None:
    queue = [waiting(incr, arrival_s) for incr, arrival_s in drawn]
    slacks_s = [task.arrival_s + 1.0 - 0.0 - (10 + task.incr_tokens) / 1000 for task in queue]
    index, postponed = pick(*queue)
    assert postponed == tuple(range(index))
    if max(slacks_s) >= 0.0:
        assert slacks_s[index] == min(slack for slack in slacks_s if slack >= 0.0)
    else:
        assert index == 0
