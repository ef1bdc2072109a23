"""The prefill queue by itself, on a clock set by hand: several prefills in one pass, and policies that wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.perf.piecewise import load_performance_model
from ampd.policies.base import OrderingPolicy, OrderingSituation, Pick, Run, Wait
from ampd.policies.registry import create
from ampd.serving.picker import LONGEST_WAIT_S, SHORTEST_WAIT_S
from ampd.serving.prefill_queue import Pass, PrefillQueue, QueueEntry, Stage
from ampd.types import Parallelism, PrefillTask, Slo

MODEL = load_performance_model("tiny-cpu")


class Clock:
    """Time that is moved by hand, with timers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, int, list[Callable[[], None]]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Callable[[], None]:
        assert delay_s > 0
        self._count += 1
        pending = [action]
        heappush(self._timers, (self.now_s + delay_s, self._count, pending))
        return pending.clear

    def pending(self) -> list[float]:
        """When the timers that were not cancelled ring."""
        return sorted(when_s for when_s, _, pending in self._timers if pending)

    def ring(self) -> bool:
        """Move on to the next timer and run it; False: there is none."""
        while self._timers:
            when_s, _, pending = heappop(self._timers)
            if pending:
                self.now_s = when_s
                pending[0]()
                return True
        return False

    def move(self, seconds: float) -> None:
        """Move on, running the timers on the way."""
        until_s = self.now_s + seconds
        while (pending := self.pending()) and pending[0] <= until_s:
            self.ring()
        self.now_s = until_s


class Scripted:
    """Gives its answers in turn, the last one for ever, as far as the queue has such positions; keeps the questions."""

    def __init__(self, *answers: Pick) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[float, list[str]]] = []

    def pick(self, situation: OrderingSituation) -> Pick:
        self.asked.append((situation.now_s, [task.task_id for task in situation.queue]))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Wait):
            return answer
        there = range(len(situation.queue))
        return replace(
            answer,
            index=min(answer.index, there[-1]),
            postponed=tuple(position for position in answer.postponed if position in there),
            together=tuple(position for position in answer.together if position in there),
        )


class Bench:
    """A queue, and what happened to each prefill in it."""

    def __init__(self, ordering: OrderingPolicy, concurrency: int = 1, prefetch: int = 1) -> None:
        self.clock = Clock()
        self.entries: dict[str, QueueEntry] = {}
        self.log: list[str] = []
        self.changes = 0
        self.queue = PrefillQueue(
            ordering,
            MODEL,
            Parallelism(),
            self.clock,
            random.Random(0),
            concurrency=concurrency,
            prefetch=prefetch,
            on_change=self._changed,
        )

    def enter(self, *names: str, fetches: bool = False) -> None:
        for name in names:
            task = PrefillTask(name, name, 0, 100, self.clock.now_s, Slo(1, 1))
            self.entries[name] = self.queue.enter(task, fetches, self._turn)

    def leave(self, *names: str) -> None:
        for name in names:
            self.queue.leave(self.entries[name])

    def at(self, stage: Stage) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.stage is stage]

    def _turn(self, entry: QueueEntry) -> None:
        self.log.append(f"{entry.task.task_id} {entry.stage.value}")
        if entry.stage is Stage.FETCHING and not entry.fetches:
            self.queue.fetched(entry)

    def _changed(self) -> None:
        self.changes += 1


def together(count: int) -> Pick:
    return Run(0, (), tuple(range(1, count)))


# -- several prefills in one pass


def test_a_pass_takes_one_slot_and_gives_it_back_with_its_last_member() -> None:
    bench = Bench(Scripted(Run(0), together(3), Run(0)))
    bench.enter("first", "a", "b", "c", "last")
    assert bench.at(Stage.COMPUTING) == ["first"]
    bench.leave("first")
    assert bench.at(Stage.COMPUTING) == ["a", "b", "c"]
    assert [one.task_id for one in bench.queue.tasks()] == ["a", "b", "c", "last"]
    bench.leave("b", "a")
    assert bench.at(Stage.COMPUTING) == ["c"]
    assert bench.at(Stage.WAITING) == ["last"]
    bench.leave("c")
    assert bench.at(Stage.COMPUTING) == ["last"]


def test_two_slots_are_two_passes() -> None:
    bench = Bench(Scripted(Run(0), Run(0), together(2), together(2), Run(0)), concurrency=2)
    bench.enter("x", "y", "a", "b", "c", "d", "last")
    bench.leave("x", "y")
    assert bench.at(Stage.COMPUTING) == ["a", "b", "c", "d"]
    bench.leave("a", "c")
    assert bench.at(Stage.WAITING) == ["last"]
    bench.leave("d")
    assert bench.at(Stage.COMPUTING) == ["b", "last"]


def mates(bench: Bench, name: str) -> list[str]:
    """The members of a prefill's pass."""
    picked = bench.entries[name].picked
    assert picked is not None
    return [task.task_id for task in picked.tasks]


def test_members_know_their_mates_while_these_are_here() -> None:
    bench = Bench(Scripted(Run(0), together(3)))
    bench.enter("first", "a", "b", "c")
    assert bench.entries["a"].picked is None
    bench.leave("first")
    assert mates(bench, "a") == ["a", "b", "c"]
    bench.leave("b")
    assert mates(bench, "a") == ["a", "c"]


def test_a_pass_computes_in_the_order_in_which_it_was_picked() -> None:
    bench = Bench(Scripted(Run(0), Run(2, (), (3, 0))))
    bench.enter("first", "a", "b", "c", "d")
    bench.log.clear()
    bench.leave("first")
    assert bench.log == [f"{name} {stage}" for stage in ("fetching", "computing") for name in "cda"]
    assert bench.at(Stage.WAITING) == ["b"]


def test_a_member_named_twice_runs_once() -> None:
    bench = Bench(Scripted(Run(0), Run(1, (), (1, 0, 0))))
    bench.enter("first", "a", "b")
    bench.leave("first")
    assert bench.log[2:] == ["b fetching", "a fetching", "b computing", "a computing"]


def test_a_pass_starts_when_all_have_read_their_history() -> None:
    bench = Bench(Scripted(Run(0), together(3), Run(0)), prefetch=0)
    bench.enter("first", "plain")
    bench.enter("a", "b", fetches=True)
    bench.leave("first")
    assert bench.at(Stage.READY) == ["plain"]
    assert bench.at(Stage.FETCHING) == ["a", "b"]
    bench.queue.fetched(bench.entries["b"])
    assert bench.at(Stage.COMPUTING) == []
    bench.queue.fetched(bench.entries["a"])
    assert bench.at(Stage.COMPUTING) == ["plain", "a", "b"]


def test_a_pass_with_something_to_read_is_picked_ahead() -> None:
    policy = Scripted(Run(0), Wait(5.0), together(2))
    bench = Bench(policy)
    bench.enter("first", "plain")
    assert len(policy.asked) == 1, "nothing to read: no reason to choose before there is room"
    bench.enter("reader", fetches=True)
    assert bench.at(Stage.WAITING) == ["plain", "reader"]
    bench.clock.move(5.0)
    assert bench.at(Stage.READY) == ["plain"]
    assert bench.at(Stage.FETCHING) == ["reader"]
    bench.leave("first")
    assert bench.at(Stage.COMPUTING) == []
    bench.queue.fetched(bench.entries["reader"])
    assert bench.at(Stage.COMPUTING) == ["plain", "reader"]


def test_a_pass_without_anything_to_read_is_not_picked_ahead() -> None:
    bench = Bench(Scripted(Run(0), Run(0, (), (1,))))
    bench.enter("first", "a", "b")
    bench.enter("reader", fetches=True)
    assert bench.at(Stage.WAITING) == ["a", "b", "reader"]


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_who_leaves_while_it_reads_no_longer_holds_its_mates_up(victim: str) -> None:
    bench = Bench(Scripted(Run(0), together(3)), prefetch=0)
    bench.enter("first")
    bench.enter("a", "b", "c", fetches=True)
    bench.leave("first")
    others = [name for name in "abc" if name != victim]
    for name in others:
        bench.queue.fetched(bench.entries[name])
    assert bench.at(Stage.COMPUTING) == []
    bench.leave(victim)
    assert bench.at(Stage.COMPUTING) == others


def test_a_pass_that_everybody_leaves_holds_nobody_up() -> None:
    bench = Bench(Scripted(Run(0), together(2), Run(0)), prefetch=0)
    bench.enter("first")
    bench.enter("a", "b", fetches=True)
    bench.leave("first")
    bench.enter("next")
    bench.leave("a", "b")
    assert bench.at(Stage.COMPUTING) == ["next"]


def test_an_owner_that_makes_its_mate_leave_at_its_turn() -> None:
    bench = Bench(Scripted(Run(0), together(2), Run(0)))
    bench.enter("first")

    def turn(entry: QueueEntry) -> None:
        bench.queue.fetched(entry)
        if entry.stage is Stage.COMPUTING:
            bench.leave("b")

    bench.entries["a"] = bench.queue.enter(PrefillTask("a", "a", 0, 1, 0.0, Slo(1, 1)), False, turn)
    bench.enter("b")
    bench.leave("first")
    assert bench.at(Stage.COMPUTING) == ["a"]
    assert "b computing" not in bench.log
    bench.enter("last")
    bench.leave("a")
    assert bench.at(Stage.COMPUTING) == ["last"]


# -- waiting


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
    assert {one.postponements for one in bench.queue.tasks()} == {0}


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


def test_waits_before_two_picks_do_not_add_up() -> None:
    bench = Bench(Scripted(Wait(6.0), Run(0), Wait(6.0)), concurrency=2)
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


# -- all at once, by dice


class Dice:
    """Any pick: any size of pass, in any order, and waits of any length."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.wait_until_s: float | None = None

    def pick(self, situation: OrderingSituation) -> Pick:
        count = len(situation.queue)
        positions = self._rng.sample(range(count), self._rng.randint(1, count))
        self.wait_until_s = None
        wait_s = self._rng.choice([0.0, 0.0, 1e-12, 0.004, 0.5])
        if wait_s:
            self.wait_until_s = situation.now_s + max(wait_s, SHORTEST_WAIT_S)
            return Wait(wait_s)
        return Run(positions[0], tuple(range(min(positions))), tuple(positions[1:]))


def passes(bench: Bench, *stages: Stage) -> set[Pass | None]:
    return {bench.entries[name].picked for stage in stages for name in bench.at(stage)}


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    concurrency=st.integers(1, 3),
    prefetch=st.integers(0, 2),
    actions=st.lists(
        st.sampled_from(["enter", "enter", "enter-fetching", "enter-fetching", "read", "leave", "ring", "move"]),
        max_size=80,
    ),
)
def test_whatever_a_policy_answers_everybody_runs_and_slots_are_passes(
    seed: int, concurrency: int, prefetch: int, actions: list[str]
) -> None:
    rng = random.Random(seed)
    policy = Dice(rng)
    bench = Bench(policy, concurrency, prefetch)
    ran: list[str] = []

    def check() -> None:
        ran.extend(name for name in bench.at(Stage.COMPUTING) if name not in ran)
        computing = passes(bench, Stage.COMPUTING)
        ahead = passes(bench, Stage.FETCHING, Stage.READY)
        assert not computing & ahead, "a pass starts as a whole"
        assert len(computing) <= concurrency
        assert len(computing) + len(ahead) <= concurrency + prefetch
        assert len(bench.clock.pending()) <= 1
        free = concurrency - len(computing) - len(ahead)
        if bench.at(Stage.WAITING) and free > 0:
            # Nobody is forgotten: there is a timer, and it is no later than the policy said.
            assert policy.wait_until_s is not None
            assert bench.clock.pending()
            assert bench.clock.pending()[0] <= policy.wait_until_s + 1e-9

    for number, action in enumerate(actions):
        alive = [name for name, entry in bench.entries.items() if entry.stage is not Stage.LEFT]
        if action.startswith("enter"):
            bench.enter(f"t{number}", fetches=action == "enter-fetching")
        elif action == "read" and alive:
            bench.queue.fetched(bench.entries[rng.choice(alive)])
        elif action == "leave" and alive:
            bench.leave(rng.choice(alive))
        elif action == "ring":
            bench.clock.ring()
        elif action == "move":
            bench.clock.move(rng.choice([0.0005, 0.1]))
        check()

    stayed = [name for name, entry in bench.entries.items() if entry.stage is not Stage.LEFT]
    for _ in range(100_000):
        if not len(bench.queue):
            break
        for name in bench.at(Stage.FETCHING):
            bench.queue.fetched(bench.entries[name])
            check()
        if computing := bench.at(Stage.COMPUTING):
            bench.leave(computing[0])
        elif not bench.at(Stage.FETCHING):
            assert bench.clock.ring(), "somebody waits, and nobody will ask the policy"
        check()
    assert len(bench.queue) == 0
    assert bench.clock.pending() == []
    assert set(stayed) <= set(ran)
    started = [line.split()[0] for line in bench.log if line.endswith("computing")]
    assert len(started) == len(set(started))
