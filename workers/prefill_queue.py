"""The prefill queue on asyncio: an owner awaits its turn, and gives its place back however its block ends."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy
from ampd.serving.prefill_queue import PrefillQueue, QueueEntry
from ampd.telemetry.metrics import names
from ampd.types import Parallelism, PrefillTask
from ampd.wire import OVERLOADED, with_retry_after
from workers.engines.base import EngineError
from workers.unfailing import UnfailingOrdering

log = logging.getLogger(__name__)

MOST_ROUNDS = 2048
"""Prefills in the queue of a worker. Coordinators refuse rounds long before; this is the defence against many of them
with an old view, and bounds the memory of the worker."""

MOST_TOKENS = 16_000_000
"""Tokens of all prompts in the queue of a worker. A waiting prompt takes 40 bytes per token."""


class PrefillRefusedError(EngineError):
    """A prefill is not computed because of load: there is no room in the queue, or it has waited for too long."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(with_retry_after(message, retry_after_s), OVERLOADED)


class QueuePlace:
    """One prefill's place. Its owner calls `picked`, reads the history, calls `slot`, computes, and calls `leave`."""

    def __init__(self, queue: AsyncPrefillQueue, task: PrefillTask, fetches: bool) -> None:
        self._queue = queue
        self._turn = asyncio.Event()
        self._entered_s = queue.now_s()
        self._entry = queue.enter(task, fetches, self._wake)

    async def picked(self) -> None:
        """Wait until the policy has chosen this prefill: the moment to read its history.

        Raises:
            PrefillRefusedError: it has waited in this queue for longer than the queue's patience.
        """
        # Not since its arrival: a round that a lost worker has held up for long would be given up at once.
        task, since_s = self._entry.task, self._entered_s
        try:
            async with asyncio.timeout(self._queue.patience_left_s(task, since_s)):
                await self._turn.wait()
        except TimeoutError:
            raise self._queue.given_up(task, since_s) from None

    async def slot(self) -> None:
        """Report that the history is here (or will be recomputed) and wait for room in the engine."""
        self._turn.clear()
        self._queue.fetched(self._entry)
        await self._turn.wait()

    def passes(self, left_tokens: int, is_last: bool) -> None:
        """Called when the engine begins a pass over its prefill, as `workers.engines.base.OnPass`."""
        self._queue.passes(self._entry, left_tokens, is_last=is_last)

    @property
    def task(self) -> PrefillTask:
        """What is left of its prefill."""
        return self._entry.task

    def leave(self) -> None:
        """Give the place and the slot back; any number of times."""
        self._queue.leave(self._entry)

    def _wake(self, _entry: QueueEntry) -> None:
        self._turn.set()


class AsyncPrefillQueue(PrefillQueue):
    """`ampd.serving.prefill_queue.PrefillQueue` on the real clock, entered with a `with` block.

    Args:
        patience_s: how long a prefill waits in the queue for its turn before it is given up.

    Attributes:
        dropped: prefills that were refused, by the reason in `names.DROPS`.
    """

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: Callable[[PrefillTask], float] = lambda _: math.inf,
    ) -> None:
        super().__init__(
            UnfailingOrdering(ordering), model, parallelism, _LoopTimer(clock), random.Random(), on_change=on_change
        )
        self.dropped: Counter[str] = Counter()
        self._clock = clock
        self._patience_s = patience_s

    def now_s(self) -> float:
        """The time on the clock of the tasks."""
        return self._clock()

    def patience_left_s(self, task: PrefillTask, since_s: float) -> float | None:
        """Seconds until a prefill that waits since then is given up; None: never."""
        left_s = since_s + self._patience_s(task) - self._clock()
        return left_s if left_s < math.inf else None

    def given_up(self, task: PrefillTask, since_s: float) -> PrefillRefusedError:
        """The error of a prefill that has waited for too long since then."""
        self.dropped[names.PATIENCE] += 1
        waited_s = self._clock() - since_s
        message = f"the round has waited for {waited_s:.1f} s, far beyond its target of {task.slo.ttft_s:g} s"
        return PrefillRefusedError(message, task.slo.ttft_s)

    @contextmanager
    def place(self, task: PrefillTask, fetches: bool) -> Iterator[QueuePlace]:
        """Enter a prefill. It leaves with the block, however that ends. `fetches`: it has a history to read first.

        Raises:
            PrefillRefusedError: the queue is full.
        """
        self._check_room(task)
        place = QueuePlace(self, task, fetches)
        try:
            yield place
        finally:
            place.leave()

    def _check_room(self, task: PrefillTask) -> None:
        if task.has_output:
            return  # these are few: rounds that a lost worker was decoding
        waiting = self.tasks()
        tokens = sum([each.context_tokens for each in waiting]) + task.context_tokens
        if len(waiting) >= MOST_ROUNDS or (waiting and tokens > MOST_TOKENS):
            self.dropped[names.QUEUE_FULL] += 1
            message = f"the queue of this worker is full: {len(waiting)} prefills wait, {tokens} tokens with this one"
            raise PrefillRefusedError(message, task.slo.ttft_s)


@dataclass(frozen=True, slots=True)
class _LoopTimer:
    """The timers of the running event loop, beside the clock of the tasks."""

    clock: Callable[[], float]

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(delay_s, action).cancel
