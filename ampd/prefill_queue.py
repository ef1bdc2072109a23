"""The prefill queue of a worker: the ordering policy picks, KV reads overlap computation, slots bound the engine.

No clock and no waiting of its own: the workers run it on asyncio (`workers.prefill_queue`), the simulator in virtual
time, so both queue by the same object.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy
from ampd.types import Parallelism, PrefillTask


class Stage(Enum):
    """How far a prefill has come."""

    WAITING = "waiting"
    FETCHING = "fetching"
    READY = "ready"
    COMPUTING = "computing"
    LEFT = "left"


class QueueEntry:
    """One prefill's place in the queue.

    Its owner is called (`on_turn`) when the entry turns FETCHING (the policy has picked it: the moment to read its
    history) and when it turns COMPUTING (there is room in the engine). The owner says `fetched` in between, and
    `leave` at the end, or at any moment before (cancellation), any number of times.
    """

    __slots__ = ("_on_turn", "_queue", "fetches", "stage", "task")

    def __init__(
        self, queue: PrefillQueue, task: PrefillTask, fetches: bool, on_turn: Callable[[QueueEntry], None]
    ) -> None:
        self._queue = queue
        self._on_turn = on_turn
        self.task = task
        self.fetches = fetches
        self.stage = Stage.WAITING

    def fetched(self) -> None:
        """Say that the history is here (or will be recomputed)."""
        if self.stage is Stage.FETCHING:
            self.stage = Stage.READY
            self._queue.advance()

    def leave(self) -> None:
        """Give the place and the slot back: the prefill is done, or nobody wants it any more."""
        if self.stage is not Stage.LEFT:
            self.stage = Stage.LEFT
            self._queue.remove(self)

    def step(self, stage: Stage) -> None:
        """Called by the queue only: move on and tell the owner."""
        self.stage = stage
        self._on_turn(self)


class PrefillQueue:
    """Prefills that wait, read and compute on one worker.

    Waiting prefills are picked by the policy, one at a time, while there is room: `concurrency` of them compute, and up
    to `prefetch` more that have a history to read are picked ahead of their slot, so that their read overlaps the
    computation. A prefill without a read is never picked ahead: the later the choice, the better it is. Picked prefills
    compute in the order in which they were picked.

    Args:
        clock: the clock of the tasks' `arrival_s`.
        on_change: called after every change of the queue.
    """

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        concurrency: int = 1,
        prefetch: int = 1,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._ordering = ordering
        self._model = model
        self._parallelism = parallelism
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._on_change = on_change
        self._clock = clock
        self._rng = rng
        self._waiting: list[QueueEntry] = []
        self._staged: list[QueueEntry] = []
        self._computing: list[QueueEntry] = []
        self._advancing = False

    def enter(self, task: PrefillTask, fetches: bool, on_turn: Callable[[QueueEntry], None]) -> QueueEntry:
        """Enter a prefill. `fetches`: it has a history to read first. Its turn may come before this returns."""
        entry = QueueEntry(self, task, fetches, on_turn)
        self._waiting.append(entry)
        self.advance()
        return entry

    def tasks(self) -> tuple[PrefillTask, ...]:
        """All prefills here: those that compute, those that are picked, those that wait."""
        return tuple([entry.task for entry in (*self._computing, *self._staged, *self._waiting)])

    def __len__(self) -> int:
        return len(self._waiting) + len(self._staged) + len(self._computing)

    def advance(self) -> None:
        """Move everything on that can move."""
        if self._advancing:
            return  # called by an owner whose turn came: the loop below goes on with what it changed
        self._advancing = True
        try:
            while self._start_next() or self._pick_next():
                pass
        finally:
            self._advancing = False
        self._on_change()

    def remove(self, entry: QueueEntry) -> None:
        """Called by an entry that leaves."""
        for stage in (self._computing, self._waiting, self._staged):
            if entry in stage:
                stage.remove(entry)
                break
        self.advance()

    def _start_next(self) -> bool:
        if not self._staged or len(self._computing) >= self._concurrency or self._staged[0].stage is not Stage.READY:
            return False
        entry = self._staged.pop(0)
        self._computing.append(entry)
        entry.step(Stage.COMPUTING)
        return True

    def _pick_next(self) -> bool:
        if not self._waiting:
            return False
        free = self._concurrency - len(self._computing) - len(self._staged)
        if free + self._prefetch <= 0:
            return False
        queue = [entry.task for entry in self._waiting]
        pick = self._ordering.pick(queue, self._parallelism, self._model, self._clock(), self._rng)
        entry = self._waiting[pick.index]
        if free <= 0 and not entry.fetches:
            return False
        for index in pick.postponed:
            late = self._waiting[index]
            late.task = replace(late.task, postponements=late.task.postponements + 1)
        del self._waiting[pick.index]
        self._staged.append(entry)
        entry.step(Stage.FETCHING)
        return True
