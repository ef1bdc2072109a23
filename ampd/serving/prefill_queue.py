"""The prefill queue of a worker: the ordering policy picks, KV reads overlap computation, slots bound the engine.

The queue has no clock and no timer of its own. The workers run it on asyncio (`workers.prefill_queue`) and the
simulator in virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy, OrderingSituation, Run, Wait
from ampd.policies.estimates import Queue
from ampd.types import Parallelism, PrefillTask

# -- The choice of the next prefill: the ordering policy is asked, and asked again after a wait.

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


CONCURRENCY = 1
"""Passes that the engine computes at the same time: a second one would only share the GPU with the first."""

PREFETCH = 1
"""Passes whose history is read while earlier ones compute."""


class Stage(Enum):
    """How far a prefill has come."""

    WAITING = "waiting"
    FETCHING = "fetching"
    READY = "ready"
    COMPUTING = "computing"
    LEFT = "left"


# Python looks a member of an enumeration up at each use, in compiled modules too.
_WAITING: Final = Stage.WAITING
_FETCHING: Final = Stage.FETCHING
_READY: Final = Stage.READY
_COMPUTING: Final = Stage.COMPUTING
_LEFT: Final = Stage.LEFT


class Pass:
    """Prefills that the policy picked to be computed together. They share one slot.

    Attributes:
        members: the prefills that have not left, in the order in which they were picked.
    """

    __slots__ = ("members",)

    def __init__(self, members: list[QueueEntry]) -> None:
        self.members = members

    @property
    def has_slot(self) -> bool:
        """Whether it needs a slot still."""
        return any(not entry.is_ending for entry in self.members)

    @property
    def tasks(self) -> list[PrefillTask]:
        """What is left of each member."""
        return [entry.task for entry in self.members]


class QueueEntry:
    """One prefill in the queue.

    Attributes:
        task: what is left of the prefill.
        fetches: the prefill has a history to read before it is computed.
        is_ending: the engine has begun its last pass.
        on_turn: called with the entry when it turns FETCHING (the policy has picked it, its history is to be read) and
            when it turns COMPUTING (its pass has a slot).
        picked: the pass for which the policy picked the prefill. None: it waits, or it left while it waited.
    """

    __slots__ = ("fetches", "is_ending", "on_turn", "picked", "stage", "task")

    def __init__(self, task: PrefillTask, fetches: bool, on_turn: Callable[[QueueEntry], None]) -> None:
        self.task = task
        self.fetches = fetches
        self.on_turn = on_turn
        self.is_ending = False
        self.stage = _WAITING
        self.picked: Pass | None = None


class PrefillQueue:
    """Prefills that wait, read and compute on one worker.

    The policy picks among the waiting prefills while there is room, one pass at a time. `CONCURRENCY` passes compute.
    Up to `PREFETCH` more passes with a history to read are picked before they have a slot, so that their reads overlap
    the computation. A pass without a read is not picked early, because a later choice knows more. Picked passes
    compute in the order in which they were picked. A pass starts when all its members are READY, and gives its slot
    back when all of them have left.

    The engine tells with each pass what is left of a prefill. With its last pass the slot is free, because the engine
    would know the next prefill when that pass ends.

    A policy may also answer that it waits. It is asked again after that time, or earlier if the queue changes.

    An owner enters its prefill, calls `fetched` after the entry's first turn and `leave` at the end. It may leave at
    any moment (cancellation), and any number of times.

    Args:
        on_change: called after every change of the queue.

    Attributes:
        waiting: prefills that are not picked, in order of arrival.
        staged: passes that are picked and have no slot yet.
        computing: passes that have a slot.
        postponements: how often a later prefill was picked before an earlier one.
    """

    def __init__(
        self,
        ordering: OrderingPolicy,
        model: PerformanceModel,
        parallelism: Parallelism,
        timer: Timer,
        rng: random.Random,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._picker = Picker(ordering, model, parallelism, timer, rng)
        self._on_change = on_change
        self.waiting: list[QueueEntry] = []
        self.staged: list[Pass] = []
        self.computing: list[Pass] = []
        self.postponements = 0
        self._advancing = False
        self._listed: Queue | None = None

    def enter(self, task: PrefillTask, fetches: bool, on_turn: Callable[[QueueEntry], None]) -> QueueEntry:
        """Enter a prefill. Its turn may come before this returns."""
        entry = QueueEntry(task, fetches, on_turn)
        self.waiting.append(entry)
        self._listed = None
        try:
            self._advance()
        except BaseException:
            # The owner gets no entry that could leave.
            self._take_out(entry)
            _end(entry)
            raise
        return entry

    def fetched(self, entry: QueueEntry) -> None:
        """The history of a FETCHING prefill is here, or will be recomputed."""
        if entry.stage is _FETCHING:
            entry.stage = _READY
            self._advance()

    def passes(self, entry: QueueEntry, left_tokens: int, *, is_last: bool) -> None:
        """The engine has begun a pass over a COMPUTING prefill, of which `left_tokens` are left after it.

        The last pass counts as what was left before it.
        """
        if entry.stage is not _COMPUTING:
            return
        if left_tokens:
            self._listed = None
            left_tokens = min(left_tokens, entry.task.context_tokens)
            entry.task = entry.task.with_tokens(entry.task.context_tokens - left_tokens, left_tokens)
        if is_last and not entry.is_ending:
            entry.is_ending = True
            self._advance()

    def leave(self, entry: QueueEntry) -> None:
        """A prefill gives its place and its slot back: it is done or cancelled."""
        if entry.stage is not _LEFT:
            self._take_out(entry)
            _end(entry)
            self._advance()

    def tasks(self) -> Queue:
        """All prefills here: those that compute, then those that are picked, then those that wait."""
        if self._listed is not None:
            return self._listed
        tasks = [entry.task for picked in self.computing for entry in picked.members]
        tasks += [entry.task for picked in self.staged for entry in picked.members]
        tasks += [entry.task for entry in self.waiting]
        self._listed = Queue(tasks)
        return self._listed

    def __len__(self) -> int:
        return len(self.tasks())

    def _take_out(self, entry: QueueEntry) -> None:
        self._listed = None
        if entry.picked is None:
            self.waiting.remove(entry)
            return
        members = entry.picked.members
        members.remove(entry)
        if not members:
            (self.computing if entry.picked in self.computing else self.staged).remove(entry.picked)

    def _advance(self) -> None:
        """Move everything on that can move."""
        if self._advancing:
            return  # an owner changed the queue at its turn: the loop below goes on with that change
        self._advancing = True
        # The policy is asked below. If there is no room, the next prefill that leaves asks it.
        self._picker.cancel_wait()
        try:
            while self._start_next() or self._pick_next():
                pass
        finally:
            self._advancing = False
        self._on_change()

    def _slots_taken(self) -> int:
        return sum([picked.has_slot for picked in self.computing])

    def _start_next(self) -> bool:
        if not self.staged or self._slots_taken() >= CONCURRENCY:
            return False
        picked = self.staged[0]
        if any(entry.stage is not _READY for entry in picked.members):
            return False
        self.computing.append(self.staged.pop(0))
        _turn(picked, _READY, _COMPUTING)
        return True

    def _pick_next(self) -> bool:
        waiting = self.waiting
        free = CONCURRENCY - self._slots_taken() - len(self.staged)
        if not waiting or free <= 0:
            self._picker.no_slot_unused()
        if not waiting or free + PREFETCH <= 0:
            return False
        if free <= 0 and not any(entry.fetches for entry in waiting):
            return False
        run = self._picker.pick([entry.task for entry in waiting], free > 0, self._advance)
        if run is None:
            return False
        positions = tuple(dict.fromkeys((run.index, *run.together))) if run.together else (run.index,)
        members = [waiting[position] for position in positions]
        if free <= 0 and not any(entry.fetches for entry in members):
            return False
        self._postpone(run)
        self._listed = None
        for position in sorted(positions, reverse=True):
            del waiting[position]
        self._picker.no_slot_unused()
        picked = Pass(members)
        for entry in members:
            entry.picked = picked
        self.staged.append(picked)
        _turn(picked, _WAITING, _FETCHING)
        return True

    def _postpone(self, run: Run) -> None:
        self.postponements += len(run.postponed)
        for position in run.postponed:
            late = self.waiting[position]
            late.task = late.task.postponed()


def _end(entry: QueueEntry) -> None:
    """The prefill has left. Its owner has the entry, and the entry must not keep the owner: a cycle lives long."""
    entry.stage = _LEFT
    entry.on_turn = _no_turn


def _no_turn(_: QueueEntry) -> None:
    """A prefill that has left has no turn."""


def _turn(picked: Pass, before: Stage, after: Stage) -> None:
    # A copy, and a check of the stage: an owner may leave at its turn, or make another member leave.
    for entry in tuple(picked.members):
        if entry.stage is before:
            entry.stage = after
            entry.on_turn(entry)
