"""The prefill queue of a worker: the ordering policy picks, KV reads overlap computation, slots bound the engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """One prefill's place in the queue. Its owner calls `picked`, reads the history, calls `slot`, computes, `leave`s.

    `leave` may come at any moment (cancellation) and any number of times.
    """

    def __init__(self, queue: PrefillQueue, task: PrefillTask, fetches: bool) -> None:
        self._queue = queue
        self.task = task
        self.fetches = fetches
        self.stage = Stage.WAITING
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def picked(self) -> None:
        """Wait until the policy has chosen this prefill: the moment to read its history."""
        await self._turn

    async def slot(self) -> None:
        """Say that the history is here (or will be recomputed) and wait for room in the engine."""
        if self.stage is Stage.FETCHING:
            self.stage = Stage.READY
            self._turn = asyncio.get_running_loop().create_future()
            self._queue.advance()
        await self._turn

    def leave(self) -> None:
        """Give the place and the slot back: the prefill is done, or nobody wants it any more."""
        if self.stage is not Stage.LEFT:
            self.stage = Stage.LEFT
            self._turn.cancel()
            self._queue.remove(self)

    def step(self, stage: Stage) -> None:
        """Called by the queue only: move on and wake the owner."""
        self.stage = stage
        if not self._turn.done():
            self._turn.set_result(None)


class PrefillQueue:
    """Prefills that wait, read and compute on one worker.

    Waiting prefills are picked by the policy, one at a time, while there is room: `concurrency` of them compute, and up
    to `prefetch` more that have a history to read are picked ahead of their slot, so that their read overlaps the
    computation. A prefill without a read is never picked ahead: the later the choice, the better it is. Picked prefills
    compute in the order in which they were picked.

    Args:
        on_change: called after every change of the queue.
        clock: the clock of the tasks' `arrival_s`.
    """

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        concurrency: int = 1,
        prefetch: int = 1,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._ordering = ordering
        self._model = model
        self._parallelism = parallelism
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._on_change = on_change
        self._clock = clock
        self._rng = rng or random.Random()
        self._waiting: list[QueueEntry] = []
        self._staged: list[QueueEntry] = []
        self._computing: list[QueueEntry] = []

    @contextmanager
    def entry(self, task: PrefillTask, fetches: bool) -> Iterator[QueueEntry]:
        """Enter a prefill; it leaves with the block, however that ends. `fetches`: it has a history to read first."""
        entry = QueueEntry(self, task, fetches)
        self._waiting.append(entry)
        try:
            self.advance()
            yield entry
        finally:
            entry.leave()

    def tasks(self) -> tuple[PrefillTask, ...]:
        """All prefills here: those that compute, those that are picked, those that wait."""
        return tuple(entry.task for entry in [*self._computing, *self._staged, *self._waiting])

    def __len__(self) -> int:
        return len(self._waiting) + len(self._staged) + len(self._computing)

    def advance(self) -> None:
        """Move everything on that can move."""
        while self._start_next() or self._pick_next():
            pass
        self._on_change()

    def remove(self, entry: QueueEntry) -> None:
        """Called by an entry that leaves."""
        for stage in (self._waiting, self._staged, self._computing):
            if entry in stage:
                stage.remove(entry)
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
        self._waiting.remove(entry)
        self._staged.append(entry)
        entry.step(Stage.FETCHING)
        return True
