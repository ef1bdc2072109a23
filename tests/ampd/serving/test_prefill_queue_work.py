"""The work of a queue's prefills: right whenever somebody asks, and not added up before. And what an entry keeps."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.queue_work import QueuedPrefills, QueueWork
from ampd.serving.prefill_queue import QueueEntry, Stage
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.serving.queue_lab import MODEL, Bench, Scripted


class LastFirst:
    """Runs the last prefill first, and postpones all others."""

    def pick(self, situation: OrderingSituation) -> Pick:
        last = len(situation.queue) - 1
        return Run(last, tuple(range(last)))


def check(listed: QueuedPrefills, tasks: Iterable[PrefillTask]) -> None:
    fresh = QueueWork(MODEL, Parallelism()).changed(entered=list(tasks))
    assert listed.work is not None
    assert listed.work.total_s == fresh.total_s
    assert listed.work.in_passes_s(listed) == fresh.in_passes_s(listed)
    assert listed.work.not_over(0.0) == fresh.not_over(0.0)


@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(st.sampled_from(["enter", "enter", "leave", "correct", "again", "list", "ask"]), max_size=60),
)
def test_the_work_is_that_of_the_prefills_whenever_somebody_asks(seed: int, actions: list[str]) -> None:
    rng, bench = random.Random(seed), Bench(LastFirst())
    lists: list[QueuedPrefills] = []
    for number, action in enumerate(actions):
        alive = [name for name, entry in bench.entries.items() if entry.stage is not Stage.LEFT]
        if action == "enter":
            bench.enter(f"t{number}")
        elif action == "leave" and alive:
            bench.leave(rng.choice(alive))
        elif action in ("correct", "again") and alive:
            change = bench.queue.correct if action == "correct" else bench.queue.again
            entry = bench.entries[rng.choice(alive)]
            change(entry, replace(entry.task, hist_tokens=10, incr_tokens=max(entry.task.incr_tokens // 2, 1)))
        elif action == "list":
            lists.append(bench.queue.tasks())
        elif action == "ask":
            check(bench.queue.tasks(), bench.queue.tasks())
    for listed in lists:
        check(pickle.loads(pickle.dumps(listed)), listed)
        check(listed, listed)
    check(bench.queue.tasks(), [entry.task for entry in bench.entries.values() if entry.stage is not Stage.LEFT])


def test_nothing_is_added_up_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Scripted(Run(0)))
    changes: list[int] = []
    changed = QueueWork.changed

    def counted(self: QueueWork, left: list[PrefillTask], entered: list[PrefillTask]) -> QueueWork:
        changes.append(len(left) + len(entered))
        return changed(self, left, entered)

    monkeypatch.setattr(QueueWork, "changed", counted)
    for number in range(100):
        bench.enter(f"t{number}")
        bench.queue.tasks()
    bench.leave(*[f"t{number}" for number in range(98)])
    assert changes == []
    assert bench.queue.tasks().work is bench.queue.tasks().work
    assert changes == [2], "prefills that came and left since then are no work"


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
