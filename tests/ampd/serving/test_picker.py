"""Policies that wait: they are asked again in time, and no wait holds a worker for ever."""

from __future__ import annotations

from math import inf, nan

import pytest

from ampd.policies.base import Run, Wait
from ampd.policies.registry import create
from ampd.serving import prefill_queue
from ampd.serving.prefill_queue import LONGEST_WAIT_S, SHORTEST_WAIT_S, Stage
from tests.ampd.serving.queue_lab import Bench, Scripted


def test_the_policy_is_asked_again_when_its_wait_is_over() -> None:
    policy = Scripted(Wait(0.25), Run(0))
    bench = Bench(policy)
    bench.enter("a")
    assert bench.at(Stage.WAITING) == ["a"]
    bench.clock.move(0.2499)
    assert len(policy.asked) == 1
    bench.clock.move(0.0001)
    assert [when_s for when_s, _ in policy.asked] == pytest.approx([0.0, 0.25])
    assert bench.at(Stage.COMPUTING) == ["a"]
    assert bench.clock.pending() == []


def test_who_comes_and_who_leaves_is_reason_to_ask_at_once() -> None:
    policy = Scripted(Wait(1.0))
    bench = Bench(policy)
    bench.enter("a")
    bench.clock.move(0.5)
    bench.enter("b")
    assert policy.asked[-1] == (0.5, ["a", "b"])
    assert bench.clock.pending() == [1.5], "one wait at a time"
    bench.clock.move(0.25)
    bench.leave("a")
    assert policy.asked[-1] == (0.75, ["b"])
    assert bench.clock.pending() == [1.75]
    policy.answers = [Run(0)]
    bench.clock.move(1.0)
    assert bench.at(Stage.COMPUTING) == ["b"]


def test_a_wait_ends_with_the_last_who_waits() -> None:
    bench = Bench(Scripted(Wait(1.0)))
    bench.enter("a", "b")
    bench.leave("a", "b")
    assert bench.clock.pending() == []
    assert len(bench.queue) == 0


def test_a_wait_postpones_nobody_and_picks_nobody() -> None:
    bench = Bench(Scripted(Wait(1.0)))
    bench.enter("a", "b", fetches=True)
    assert bench.log == []
    assert {queued.postponements for queued in bench.queue.tasks()} == {0}


def test_a_wait_while_all_slots_are_taken_costs_no_slot() -> None:
    policy = Scripted(Run(0), Wait(5.0), Run(0))
    bench = Bench(policy)
    bench.enter("first")
    bench.enter("a", fetches=True)
    assert bench.clock.pending() == [5.0]
    bench.leave("first")
    assert bench.at(Stage.FETCHING) == ["a"]
    assert bench.clock.pending() == []


@pytest.mark.parametrize("wait_s", [1e-300, 1e-9, SHORTEST_WAIT_S / 2])
def test_however_tiny_the_wait_time_goes_on(wait_s: float) -> None:
    policy = Scripted(Wait(wait_s))
    bench = Bench(policy)
    bench.clock.now_s = 1e7  # where a tiny step would be lost in rounding
    bench.enter("a")
    for _ in range(5):
        assert bench.clock.ring()
    assert len(policy.asked) == 6
    assert bench.clock.now_s == pytest.approx(1e7 + 5 * SHORTEST_WAIT_S)


@pytest.mark.parametrize("wait_s", [1e-9, 0.1, 0.3, 7.0, 1e9, inf])
def test_a_policy_that_only_waits_does_not_hold_the_worker_for_ever(wait_s: float) -> None:
    bench = Bench(Scripted(Wait(wait_s)))
    bench.enter("a", "b")
    most_asks = int(LONGEST_WAIT_S / SHORTEST_WAIT_S) + 2
    for _ in range(most_asks):
        if bench.at(Stage.COMPUTING):
            break
        assert bench.clock.ring()
    assert bench.at(Stage.COMPUTING) == ["a"], "the oldest"
    assert LONGEST_WAIT_S - 1e-6 <= bench.clock.now_s <= LONGEST_WAIT_S + 2 * SHORTEST_WAIT_S
    # The next one is held as long again, from when there is room.
    bench.clock.move(3.0)
    started_s = bench.clock.now_s
    bench.leave("a")
    for _ in range(most_asks):
        if bench.at(Stage.COMPUTING):
            break
        assert bench.clock.ring()
    assert bench.at(Stage.COMPUTING) == ["b"]
    assert bench.clock.now_s == pytest.approx(started_s + LONGEST_WAIT_S, abs=2 * SHORTEST_WAIT_S)


def test_waits_of_a_queue_that_was_empty_between_do_not_add_up() -> None:
    bench = Bench(Scripted(Wait(6.0)))
    bench.enter("a")
    bench.clock.move(6.0)
    bench.leave("a")
    bench.clock.move(6.0)
    bench.enter("b")
    assert bench.at(Stage.WAITING) == ["b"]


def test_waits_before_two_picks_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "CONCURRENCY", 2)
    bench = Bench(Scripted(Wait(6.0), Run(0), Wait(6.0)))
    bench.enter("a")
    bench.clock.move(3.0)
    bench.enter("b")
    assert bench.at(Stage.COMPUTING) == ["a"]
    bench.clock.move(8.0)
    assert bench.at(Stage.WAITING) == ["b"], "held for 8 s, and the slots for 11 s"
    bench.clock.move(2.0 + SHORTEST_WAIT_S)
    assert bench.at(Stage.COMPUTING) == ["a", "b"]


@pytest.mark.parametrize("wait_s", [nan, 0.0, -1.0])
def test_a_wait_that_is_none_is_the_shortest_one(wait_s: float) -> None:
    bench = Bench(Scripted(Wait(wait_s), Run(0)))
    bench.enter("a")
    assert bench.clock.pending() == [SHORTEST_WAIT_S]
    assert bench.clock.ring()
    assert bench.at(Stage.COMPUTING) == ["a"]


def test_a_batch_fills_while_the_policy_waits() -> None:
    bench = Bench(create("ordering", "laps", max_wait_s=0.2, depth=4))
    bench.enter("a")
    for name in "bc":
        bench.clock.move(0.03)
        bench.enter(name)
    assert bench.at(Stage.WAITING) == ["a", "b", "c"]
    bench.enter("d")
    assert bench.at(Stage.COMPUTING) == ["a", "b", "c", "d"], "full"
    bench.enter("e", "f")
    bench.leave("a", "b", "c", "d")
    assert bench.at(Stage.WAITING) == ["e", "f"]
    assert bench.clock.ring()
    assert bench.at(Stage.COMPUTING) == ["e", "f"]
    assert bench.clock.now_s == pytest.approx(0.06 + 0.2 * 2 / 3)
