"""The list of a queue's prefills with their work, which is added up when somebody asks for it.

Many decisions list a queue and read no sums of it. So changes are only noted, and a prefill that enters and leaves
between two questions costs nothing. The sums are exact, so they do not depend on when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.queue_work import QueuedPrefills, QueueWork, queued, queued_lazily
from ampd.types import Parallelism, PrefillTask


class LazyWork:
    """The work of one queue, and the list of its prefills as long as that does not change.

    Attributes:
        listed: the prefills that are here; None: they have changed since they were listed.
    """

    __slots__ = ("_empty", "_entered", "_known", "_left", "_none", "listed")

    def __init__(self, model: PerformanceModel, parallelism: Parallelism) -> None:
        self._none = self._known = _no_work(model, parallelism)
        self._empty = queued((), self._none)
        self.listed: QueuedPrefills | None = self._empty
        # Between the prefills of `_known` and those that are here now.
        self._entered: list[PrefillTask] = []
        self._left: list[PrefillTask] = []

    def change(self, left: PrefillTask | None = None, entered: PrefillTask | None = None) -> None:
        """Note that a prefill left or entered. A changed prefill does both."""
        self.listed = None
        if self._none is None:
            return
        if left is not None and not _taken_from(self._entered, left):
            self._left.append(left)
        if entered is not None:
            self._entered.append(entered)

    def relist(self, tasks: Sequence[PrefillTask]) -> QueuedPrefills:
        """The prefills that are here now, with their work."""
        self.listed = here = queued_lazily(tasks, self._work_of) if tasks else self._empty
        return here

    def _work_of(self, tasks: QueuedPrefills) -> QueueWork | None:
        """The work of prefills that were listed, the present ones as a rule."""
        if self._none is None or self._known is None:
            return None
        if tasks is not self.listed:
            return self._none.changed(entered=tasks)
        if self._left or self._entered:
            self._known = self._known.changed(self._left, self._entered)
            self._left, self._entered = [], []
        return self._known


def _taken_from(tasks: list[PrefillTask], left: PrefillTask) -> bool:
    """Remove a prefill from a list, whatever its postponements, which are no work; False: it is not there."""
    for place, task in enumerate(tasks):
        if (
            task.task_id == left.task_id
            and task.hist_tokens == left.hist_tokens
            and task.incr_tokens == left.incr_tokens
            and task.arrival_s == left.arrival_s
        ):
            del tasks[place]
            return True
    return False


def _no_work(model: PerformanceModel, parallelism: Parallelism) -> QueueWork | None:
    """The work of an empty queue. None: the model lacks the parallelism, which not every policy needs."""
    try:
        return QueueWork(model, parallelism)
    except UserError:
        return None
