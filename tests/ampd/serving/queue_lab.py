"""A prefill queue on a clock set by hand, and an ordering policy that gives scripted answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from ampd.perf.presets import load_performance_model
from ampd.policies.base import OrderingPolicy, OrderingSituation, Pick, Run, Wait
from ampd.serving.prefill_queue import PrefillQueue, QueueEntry, Stage
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

    def __init__(self, ordering: OrderingPolicy) -> None:
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
