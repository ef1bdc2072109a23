"""The work in a worker's queue: the sums that decisions read, kept up to date as the queue changes.

A decision compares all workers. If it added up every prefill of every queue, a long queue would make each decision
slow, just when there is most to decide. So the owner of a queue keeps a `QueueWork` beside it. A prefill that enters or
leaves changes the sums, and a decision reads them.

The sums are exact integers. Their order of addition therefore does not matter, and a sum that was changed a million
times equals the sum of what is there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ampd.perf.model import PerformanceModel
from ampd.policies.passes import shortest_pass_s
from ampd.types import Parallelism, PrefillTask, QueueRest, WorkerView

_UNITS_PER_S = float(1 << 80)
"""Unit of the exact sums. A time of 8 ns or more is a whole number of units, so nothing of it is lost."""

_MARGIN_S = 1e-3
"""More than the rounding of any deadline."""

_SORTED_AT_ONCE = 8
"""From this many entering prefills on, sorting is faster than inserting."""


Waiting = tuple[float, float, float, float, bool]
"""What decides whether a prefill of a queue is on time: (the end of its whole TTFT target on the clock of its arrival,
its TTFT target, its arrival, the seconds that it takes alone, whether its session has missed a target). A plain tuple,
because a routing decision reads hundreds, and the fields of a named one take twice as long to read."""


class QueueWork:
    """The work of a queue's prefills on one kind of worker. It never changes; `changed` makes another one.

    Attributes:
        model, parallelism: the times are those of this model for such a worker.
        total_s: time of all prefills, one after the other.
    """

    __slots__ = (
        "_behind_s",
        "_by_deadline",
        "_fixed_s",
        "_in_passes",
        "_in_passes_s",
        "_rest",
        "_shorts",
        "_tiny",
        "_total",
        "model",
        "parallelism",
        "total_s",
    )

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        """The work of an empty queue.

        Raises:
            UserError: the model lacks the parallelism.
        """
        self.model = model
        self.parallelism = parallelism
        self.total_s = self._in_passes_s = 0.0
        self._fixed_s = shortest_pass_s(model, 0, parallelism)
        self._by_deadline: list[Waiting] = []
        self._total = self._in_passes = self._shorts = self._tiny = 0
        self._rest: QueueRest | None = None
        self._behind_s = (0.0, 0.0)

    def changed(self, left: Iterable[PrefillTask] = (), entered: Sequence[PrefillTask] = ()) -> QueueWork:
        """The work after some prefills have left the queue and others have entered it.

        A prefill that changes leaves as it was and enters as it is.

        Raises:
            ValueError: a prefill leaves that is not there.
        """
        after = self._copy()
        for task in left:
            after._remove(after._waiting(task))
        after._insert([after._waiting(task) for task in entered])
        after.total_s = after._total / _UNITS_PER_S
        after._in_passes_s = (after._in_passes + (_units(after._fixed_s) if after._shorts else 0)) / _UNITS_PER_S
        return after

    def in_passes_s(self, tasks: Iterable[PrefillTask]) -> float:
        """Time of all prefills. Short ones share passes, so that only the first pays a pass's fixed time.

        Args:
            tasks: the queue, in order.
        """
        if not self._tiny:
            return self._in_passes_s
        # The first short one may take even less than the fixed time.
        return (self._in_passes + _units(min(self._first_short_s(tasks), self._fixed_s))) / _UNITS_PER_S

    def with_rest_s(self, tasks: Iterable[PrefillTask], rest: QueueRest) -> float:
        """The time of all prefills, and of those that a view only counts, behind them. Each of these takes the mean."""
        if rest is not self._rest:
            # A decision asks for all workers, and few queues change between two decisions.
            self._rest, self._behind_s = rest, self._times_behind_s(rest)
        first_s, all_s = self._behind_s
        return self.in_passes_s(tasks) + first_s + all_s

    def _times_behind_s(self, rest: QueueRest) -> tuple[float, float]:
        """What counted prefills add behind these: (the fixed time that the first one pays, the other time)."""
        each_s = mean_rest_s(rest, self.model, self.parallelism)
        if each_s >= 2.0 * self._fixed_s:
            return 0.0, rest.tasks * each_s
        first_s = 0.0 if self._shorts else min(each_s, self._fixed_s)
        return first_s, rest.tasks * max(each_s - self._fixed_s, 0.0)

    def not_over(self, now_s: float) -> Sequence[Waiting]:
        """The prefills whose TTFT target is not over, by deadline. It may be over for less than a millisecond."""
        return self._by_deadline[bisect_left(self._by_deadline, (now_s - _MARGIN_S,)) :]

    def _copy(self) -> QueueWork:
        copy = QueueWork.__new__(QueueWork)
        copy.model, copy.parallelism, copy._fixed_s = self.model, self.parallelism, self._fixed_s
        copy._by_deadline = self._by_deadline.copy()
        copy._rest, copy._behind_s = None, (0.0, 0.0)
        copy._total, copy._in_passes, copy._shorts, copy._tiny = (
            self._total,
            self._in_passes,
            self._shorts,
            self._tiny,
        )
        return copy

    def _waiting(self, task: PrefillTask) -> Waiting:
        ttft_s, arrival_s = task.slo.ttft_s, task.arrival_s
        time_s = self.model.prefill_s(task.hist_tokens, task.incr_tokens, self.parallelism)
        return (arrival_s + ttft_s, ttft_s, arrival_s, time_s, task.session_missed)

    def _insert(self, prefills: list[Waiting]) -> None:
        for _, _, _, time_s, _ in prefills:
            self._add(time_s, 1)
        if len(prefills) < _SORTED_AT_ONCE:
            for prefill in prefills:
                insort(self._by_deadline, prefill)
        else:
            self._by_deadline += prefills
            self._by_deadline.sort()

    def _remove(self, prefill: Waiting) -> None:
        place = bisect_left(self._by_deadline, prefill)
        time_s = prefill[3]
        if self._by_deadline[place : place + 1] != [prefill]:
            raise ValueError(f"a prefill of {time_s} s leaves a queue that does not have it")
        del self._by_deadline[place]
        self._add(time_s, -1)

    def _add(self, time_s: float, count: int) -> None:
        units, fixed_s = count * _units(time_s), self._fixed_s
        self._total += units
        if time_s >= 2.0 * fixed_s:
            self._in_passes += units
            return
        self._shorts += count
        if time_s <= fixed_s:
            self._tiny += count
        else:
            self._in_passes += count * _units(time_s - fixed_s)

    def _first_short_s(self, tasks: Iterable[PrefillTask]) -> float:
        times_s = (self.model.prefill_s(task.hist_tokens, task.incr_tokens, self.parallelism) for task in tasks)
        return next(time_s for time_s in times_s if time_s < 2.0 * self._fixed_s)


class QueuedPrefills(tuple[PrefillTask, ...]):
    """The prefills of a queue, in order, together with their work. A part of it is a plain tuple again."""

    _work: QueueWork | None = None
    _add_up: Callable[[QueuedPrefills], QueueWork | None] | None = None

    @property
    def work(self) -> QueueWork | None:
        """The work of these prefills; None if the performance model lacks the worker's parallelism."""
        add_up = self._add_up
        if add_up is not None:
            self._add_up = None
            self._work = add_up(self)
        return self._work

    def __reduce__(self) -> tuple[Any, ...]:
        return queued, (tuple(self), self.work)


def queued(tasks: Iterable[PrefillTask], work: QueueWork | None) -> QueuedPrefills:
    """The prefills `tasks`, whose work is `work`."""
    prefills = QueuedPrefills(tasks)
    prefills._work = work
    return prefills


def queued_lazily(tasks: Iterable[PrefillTask], add_up: Callable[[QueuedPrefills], QueueWork | None]) -> QueuedPrefills:
    """The prefills `tasks`. Their work is added up when it is asked for: many decisions need none."""
    prefills = QueuedPrefills(tasks)
    prefills._add_up = add_up
    return prefills


def work_of(worker: WorkerView, model: PerformanceModel) -> QueueWork:
    """The work of the prefills that a view lists. It is added up here if the view does not carry it.

    Raises:
        UserError: the model lacks the worker's parallelism.
    """
    work: QueueWork | None = getattr(worker.queue, "work", None)
    if (
        work is not None
        and work.model is model
        and (work.parallelism is worker.parallelism or work.parallelism == worker.parallelism)
    ):
        return work
    return QueueWork(model, worker.parallelism).changed(entered=worker.queue)


def mean_rest_s(rest: QueueRest, model: PerformanceModel, parallelism: Parallelism) -> float:
    """Mean prefill time of the waiting tasks that a view only counts and does not list. There must be at least one."""
    return model.prefill_s(rest.hist_tokens // rest.tasks, rest.incr_tokens // rest.tasks, parallelism)


def _units(seconds: float) -> int:
    return int(seconds * _UNITS_PER_S)
