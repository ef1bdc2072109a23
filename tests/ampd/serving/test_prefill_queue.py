"""The prefill queue by itself, on a clock set by hand: several prefills in one pass, whatever a policy answers."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.base import OrderingSituation, Pick, Run, Wait
from ampd.serving import prefill_queue
from ampd.serving.prefill_queue import CONCURRENCY, PREFETCH, SHORTEST_WAIT_S, Pass, QueueEntry, Stage
from ampd.types import PrefillTask, Slo
from tests.ampd.serving.queue_lab import Bench, Scripted, together

# -- several prefills in one pass


def test_a_pass_takes_one_slot_and_gives_it_back_with_its_last_member() -> None:
    bench = Bench(Scripted(Run(0), together(3), Run(0)))
    bench.enter("first", "a", "b", "c", "last")
    assert bench.at(Stage.COMPUTING) == ["first"]
    bench.leave("first")
    assert bench.at(Stage.COMPUTING) == ["a", "b", "c"]
    assert [queued.task_id for queued in bench.queue.tasks()] == ["a", "b", "c", "last"]
    bench.leave("b", "a")
    assert bench.at(Stage.COMPUTING) == ["c"]
    assert bench.at(Stage.WAITING) == ["last"]
    bench.leave("c")
    assert bench.at(Stage.COMPUTING) == ["last"]


def test_two_slots_are_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_queue, "CONCURRENCY", 2)
    bench = Bench(Scripted(Run(0), Run(0), together(2), together(2), Run(0)))
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
    bench = Bench(Scripted(Run(0), Wait(5.0), Wait(5.0), together(3), Run(0)))
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
    bench = Bench(Scripted(Run(0), Wait(5.0), Wait(5.0), Wait(5.0), together(3)))
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
    bench = Bench(Scripted(Run(0), Wait(5.0), Wait(5.0), together(2), Run(0)))
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


# -- the passes of a prefill


def test_the_next_prefill_is_picked_when_the_last_pass_of_the_first_begins() -> None:
    bench = Bench(Scripted(Run(0)))
    bench.enter("first", "second", "third")
    bench.queue.passes(bench.entries["first"], 90, is_last=False)
    assert bench.at(Stage.COMPUTING) == ["first"]
    bench.queue.passes(bench.entries["first"], 0, is_last=True)
    assert bench.at(Stage.COMPUTING) == ["first", "second"]
    bench.queue.passes(bench.entries["first"], 0, is_last=True)
    assert bench.at(Stage.COMPUTING) == ["first", "second"], "once is enough"
    bench.leave("first")
    assert bench.at(Stage.WAITING) == ["third"], "its slot was free before"


def test_a_pass_of_several_is_ending_with_its_last_member() -> None:
    bench = Bench(Scripted(Run(0), together(2), Run(0)))
    bench.enter("first", "a", "b", "next")
    bench.leave("first")
    bench.queue.passes(bench.entries["a"], 0, is_last=True)
    assert bench.at(Stage.WAITING) == ["next"]
    bench.leave("a")
    assert bench.at(Stage.WAITING) == ["next"], "b is not ending"
    bench.queue.passes(bench.entries["b"], 0, is_last=True)
    assert bench.at(Stage.COMPUTING) == ["b", "next"]


def test_the_queue_knows_what_is_left_by_the_engines_count() -> None:
    bench = Bench(Scripted(Run(0)))
    bench.enter("first", "second")
    first, second = bench.entries["first"], bench.entries["second"]
    context_tokens = first.task.context_tokens
    bench.queue.passes(first, 30, is_last=False)
    assert (first.task.hist_tokens, first.task.incr_tokens) == (context_tokens - 30, 30)
    assert bench.queue.tasks()[0].incr_tokens == 30
    bench.queue.passes(first, context_tokens + 1, is_last=False)
    assert (first.task.hist_tokens, first.task.incr_tokens) == (0, context_tokens), "its output is a part of its prompt"
    bench.queue.passes(second, 1, is_last=False)
    assert second.task.incr_tokens > 1, "it computes nothing"
    bench.queue.passes(first, 0, is_last=True)
    assert first.task.incr_tokens == context_tokens, "the last pass counts as what was left"


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


def check_listed(bench: Bench) -> None:
    """The listed prefills are those that are here now. They are one object until one changes: it keeps their times."""
    tasks = [entry.task for entry in bench.entries.values() if entry.stage is not Stage.LEFT]
    listed = bench.queue.tasks()
    assert sorted(listed, key=id) == sorted(tasks, key=id)
    assert bench.queue.tasks() is listed


@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(
        st.sampled_from(
            [
                "enter",
                "enter",
                "enter-fetching",
                "enter-fetching",
                "read",
                "leave",
                "ring",
                "move",
                "pass",
                "last-pass",
            ]
        ),
        max_size=80,
    ),
)
def test_whatever_a_policy_answers_everybody_runs_and_slots_are_passes(seed: int, actions: list[str]) -> None:
    rng = random.Random(seed)
    policy = Dice(rng)
    bench = Bench(policy)
    ran: list[str] = []

    def check() -> None:
        ran.extend(name for name in bench.at(Stage.COMPUTING) if name not in ran)
        computing = passes(bench, Stage.COMPUTING)
        ahead = passes(bench, Stage.FETCHING, Stage.READY)
        assert not computing & ahead, "a pass starts as a whole"
        slots = sum(picked is not None and picked.has_slot for picked in computing)
        assert slots <= CONCURRENCY
        assert slots + len(ahead) <= CONCURRENCY + PREFETCH
        assert len(bench.clock.pending()) <= 1
        check_listed(bench)
        free = CONCURRENCY - slots - len(ahead)
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
        elif action in ("pass", "last-pass") and alive:
            entry = bench.entries[rng.choice(alive)]
            bench.queue.passes(entry, max(entry.task.incr_tokens // 2, 1), is_last=action == "last-pass")
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
    assert all(count == 1 for count in Counter(started).values())


def test_an_entry_that_has_left_does_not_keep_its_owner() -> None:
    """A cycle of a round and its entry would live until Python looks for cycles, and make it look often."""

    class Owner:
        entry: QueueEntry

        def turn(self, _: QueueEntry) -> None:
            pass

    bench, owner = Bench(Scripted(Run(0))), Owner()
    owner.entry = bench.queue.enter(PrefillTask("t", "t", 0, 100, 0.0, Slo(1, 1)), False, owner.turn)
    bench.queue.leave(owner.entry)
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
