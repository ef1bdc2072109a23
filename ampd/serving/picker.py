"""The choice of the next prefill: the ordering policy is asked, and asked again after a wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy, OrderingSituation, Run, Wait
from ampd.types import Parallelism, PrefillTask

SHORTEST_WAIT_S = 0.001
"""A policy that asks for a shorter wait gets this one, so that time goes on between two questions."""

LONGEST_WAIT_S = 10.0
"""How long a policy may leave a free slot unused while prefills wait. After that the oldest prefill runs."""

_OLDEST = Run(0)


class Timer(Protocol):
    """The time of the queue."""

    def clock(self) -> float:
        """The time in seconds, on the clock of the tasks' `arrival_s`."""
        ...

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Callable[[], None]:
        """Run `action` after a delay. Calling the result cancels that."""
        ...


class Picker:
    """Asks the ordering policy of one worker, and bounds the time for which the policy may wait."""

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        timer: Timer,
        rng: random.Random,
    ) -> None:
        self._ordering = ordering
        self._model = model
        self._parallelism = parallelism
        self._timer = timer
        self._rng = rng
        self._cancel_wait: Callable[[], None] | None = None
        self._unused_since_s: float | None = None

    def pick(self, queue: Sequence[PrefillTask], has_room: bool, ask_again: Callable[[], None]) -> Run | None:
        """The policy's pick; None: the policy waits, and a timer calls `ask_again`.

        Args:
            queue: the waiting prefills, in order of arrival.
            has_room: a slot is free. The policy may leave it unused for `LONGEST_WAIT_S`.
        """
        now_s = self._timer.clock()
        pick = self._ordering.pick(
            OrderingSituation(model=self._model, now_s=now_s, queue=queue, parallelism=self._parallelism, rng=self._rng)
        )
        if not isinstance(pick, Wait):
            return pick
        left_s = LONGEST_WAIT_S
        if has_room:
            if self._unused_since_s is None:
                self._unused_since_s = now_s
            left_s += self._unused_since_s - now_s
            if left_s <= 0.0:
                return _OLDEST
        # The lower bound comes last: the time that is left may be too little for the clock to move.
        self._cancel_wait = self._timer.call_later(max(SHORTEST_WAIT_S, min(pick.wait_s, left_s)), ask_again)
        return None

    def cancel_wait(self) -> None:
        """Stop the timer of a wait, if there is one."""
        if self._cancel_wait is not None:
            self._cancel_wait()
            self._cancel_wait = None

    def no_slot_unused(self) -> None:
        """No slot is free, or no prefill waits: restart the count of unused time."""
        self._unused_since_s = None
