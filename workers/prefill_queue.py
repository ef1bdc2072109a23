"""The prefill queue on asyncio: an owner awaits its turn, and gives its place back however its block ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy
from ampd.serving.prefill_queue import PrefillQueue, QueueEntry
from ampd.types import Parallelism, PrefillTask


class QueuePlace:
    """One prefill's place. Its owner calls `picked`, reads the history, calls `slot`, computes, `leave`s."""

    def __init__(self, queue: PrefillQueue, task: PrefillTask, fetches: bool) -> None:
        self._turn = asyncio.Event()
        self._entry = queue.enter(task, fetches, self._wake)

    async def picked(self) -> None:
        """Wait until the policy has chosen this prefill: the moment to read its history."""
        await self._turn.wait()

    async def slot(self) -> None:
        """Say that the history is here (or will be recomputed) and wait for room in the engine."""
        self._turn.clear()
        self._entry.fetched()
        await self._turn.wait()

    async def again(self, task: PrefillTask) -> None:
        """Give the slot back with a part computed, and wait for the next turn to compute what is left (`task`)."""
        self._turn.clear()
        self._entry.again(task)
        await self.picked()
        await self.slot()

    @property
    def pass_tasks(self) -> list[PrefillTask]:
        """The tasks of all prefills that compute with this one, itself included."""
        return [entry.task for entry in self._entry.mates] or [self._entry.task]

    @property
    def is_alone(self) -> bool:
        """Whether the policy picked no other prefill for the same pass; known from `picked` on."""
        return len(self._entry.mates) <= 1

    def leave(self) -> None:
        """Give the place and the slot back; any number of times."""
        self._entry.leave()

    def _wake(self, _entry: QueueEntry) -> None:
        self._turn.set()


class AsyncPrefillQueue(PrefillQueue):
    """`ampd.serving.prefill_queue.PrefillQueue` on the real clock, entered with a `with` block."""

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        concurrency: int = 1,
        prefetch: int = 1,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            ordering,
            model,
            parallelism,
            clock=clock,
            call_later=_call_later,
            rng=random.Random(),
            concurrency=concurrency,
            prefetch=prefetch,
            on_change=on_change,
        )

    @contextmanager
    def place(self, task: PrefillTask, fetches: bool) -> Iterator[QueuePlace]:
        """Enter a prefill; it leaves with the block, however that ends. `fetches`: it has a history to read first."""
        place = QueuePlace(self, task, fetches)
        try:
            yield place
        finally:
            place.leave()


def _call_later(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(seconds, action).cancel
