"""The prefill queue of a worker: the ordering policy picks, KV reads overlap computation, slots bound the engine.

No clock and no timer of its own: the workers run it on asyncio (`workers.prefill_queue`), the simulator in virtual
time, so both queue by the same object.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy
from ampd.types import Parallelism, PrefillTask

CallLater = Callable[[float, Callable[[], None]], Callable[[], None]]
"""Runs an action after so many seconds, unless what it returns is called before."""

SHORTEST_WAIT_S = 0.001
"""A policy that asks for less waits this long: however tiny its waits, time goes on between them."""

LONGEST_WAIT_S = 10.0
"""Nobody waits longer for a policy's sake while there is room: then its pick runs, whatever it says of waiting."""


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

    Attributes:
        mates: who was picked with it for one pass and is still here, itself included; empty while it waits.
    """

    __slots__ = ("_on_turn", "_queue", "fetches", "mates", "stage", "task")

    def __init__(
        self, queue: PrefillQueue, task: PrefillTask, fetches: bool, on_turn: Callable[[QueueEntry], None]
    ) -> None:
        self._queue = queue
        self._on_turn = on_turn
        self.task = task
        self.fetches = fetches
        self.stage = Stage.WAITING
        self.mates: list[QueueEntry] = []

    def fetched(self) -> None:
        """Say that the history is here (or will be recomputed)."""
        if self.stage is Stage.FETCHING:
            self.stage = Stage.READY
            self._queue.advance()

    def again(self, task: PrefillTask) -> None:
        """Give the slot back with a part computed: `task` is what is left, and waits for its next turn."""
        if self.stage is Stage.COMPUTING:
            self.task, self.fetches, self.stage = task, False, Stage.WAITING
            self._queue.wait_again(self)

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

    Waiting prefills are picked by the policy while there is room, one pass at a time: a single prefill, or several that
    the policy wants computed together. `concurrency` passes compute, and up to `prefetch` more with a history to read
    are picked ahead of their slot, so that their read overlaps the computation. A pass without a read is never picked
    ahead: the later the choice, the better it is. Picked passes compute in the order in which they were picked; a pass
    starts when all its members are READY, and gives its slot back when all of them have left.

    A policy may also want to wait. It is asked again after that time, or before if anything changes here.

    Args:
        clock: the clock of the tasks' `arrival_s`.
        call_later: the timer of that clock.
        on_change: called after every change of the queue.

    Attributes:
        postponements: how often a later prefill was picked before an earlier one.
    """

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        *,
        clock: Callable[[], float],
        call_later: CallLater,
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
        self._call_later = call_later
        self._rng = rng
        self._waiting: list[QueueEntry] = []
        self._staged: list[QueueEntry] = []
        self._computing: list[QueueEntry] = []
        self._advancing = False
        self._cancel_wait: Callable[[], None] | None = None
        self._held_since_s: float | None = None
        self.postponements = 0

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
        if self._cancel_wait is not None:
            self._cancel_wait()  # the policy is asked below, or there is no room and the next who leaves asks it
            self._cancel_wait = None
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
        if entry in entry.mates:
            entry.mates.remove(entry)
        self.advance()

    def wait_again(self, entry: QueueEntry) -> None:
        """Called by an entry whose part is computed: back to its place by arrival."""
        self._computing.remove(entry)
        entry.mates = []
        insort(self._waiting, entry, key=lambda one: one.task.arrival_s)
        self.advance()

    def _start_next(self) -> bool:
        if not self._staged or _passes(self._computing) >= self._concurrency:
            return False
        members = self._staged[0].mates
        if any(entry.stage is not Stage.READY for entry in members):
            return False
        del self._staged[: len(members)]
        self._computing += members
        _step(members, Stage.READY, Stage.COMPUTING)
        return True

    def _pick_next(self) -> bool:
        free = self._concurrency - _passes(self._computing) - _passes(self._staged)
        if not self._waiting or free <= 0:
            self._held_since_s = None
        if not self._waiting or free + self._prefetch <= 0:
            return False
        if free <= 0 and not any(entry.fetches for entry in self._waiting):
            return False
        queue = [entry.task for entry in self._waiting]
        now_s = self._clock()
        pick = self._ordering.pick(queue, self._parallelism, self._model, now_s, self._rng)
        if pick.wait_s > 0.0 and self._wait(pick.wait_s, now_s, free > 0):
            return False
        positions = tuple(dict.fromkeys((pick.index, *pick.together)))
        members = [self._waiting[position] for position in positions]
        if free <= 0 and not any(entry.fetches for entry in members):
            return False
        self.postponements += len(pick.postponed)
        for index in pick.postponed:
            late = self._waiting[index]
            late.task = replace(late.task, postponements=late.task.postponements + 1)
        for position in sorted(positions, reverse=True):
            del self._waiting[position]
        self._staged += members
        self._held_since_s = None
        for entry in members:
            entry.mates = members
        _step(members, Stage.WAITING, Stage.FETCHING)
        return True

    def _wait(self, wait_s: float, now_s: float, has_room: bool) -> bool:
        """Ask the policy again later; False: it has held the worker for long enough."""
        left_s = LONGEST_WAIT_S
        if has_room:
            if self._held_since_s is None:
                self._held_since_s = now_s
            left_s += self._held_since_s - now_s
            if left_s <= 0.0:
                return False
        # The lower bound comes last: what is left may be too little for the clock to move.
        self._cancel_wait = self._call_later(max(min(wait_s, left_s), SHORTEST_WAIT_S), self.advance)
        return True


def _passes(entries: list[QueueEntry]) -> int:
    return len({id(entry.mates) for entry in entries})


def _step(members: list[QueueEntry], before: Stage, after: Stage) -> None:
    # A copy, and a look at the stage: an owner whose turn comes may leave, or make another leave.
    for entry in tuple(members):
        if entry.stage is before:
            entry.step(after)
