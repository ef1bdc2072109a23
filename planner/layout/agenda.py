"""Which trial is made next, where several searches go on at the same time.

A search often waits for a single trial, which keeps one core busy. So searches that do not depend on each other run
together, and the trials of one fill the cores that another one leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from planner.layout.trial import TrialTask

Steps = Iterator[Sequence[TrialTask]]
"""A search yields the trials that it waits for, and goes on when all of them are known."""


class Agenda:
    """The trials that searches wait for. Those of earlier searches come first.

    Searches that run together must not read each other's trials, or the plan depends on which is faster.

    Args:
        is_known: whether a trial was made before.
    """

    def __init__(self, searches: Iterable[Steps], is_known: Callable[[TrialTask], bool]) -> None:
        self._is_known = is_known
        self._open = [_Open(search) for search in searches]
        self._begun: set[TrialTask] = set()

    def next_task(self) -> TrialTask | None:
        """The trial to begin; None: none is needed until another one has ended."""
        for each in list(self._open):
            while each.ready(self._is_known):
                if not each.goes_on():
                    self._open.remove(each)
                    break
            fresh = next((task for task in each.awaited if task not in self._begun), None)
            if fresh is not None:
                self._begun.add(fresh)
                return fresh
        return None


class _Open:
    """A search that has not ended, and the trials that it waits for."""

    def __init__(self, search: Steps) -> None:
        self._search = search
        self.awaited: list[TrialTask] = []

    def ready(self, is_known: Callable[[TrialTask], bool]) -> bool:
        """Whether it waits for nothing more."""
        self.awaited = [task for task in self.awaited if not is_known(task)]
        return not self.awaited

    def goes_on(self) -> bool:
        """Let it go on to its next trials; False: it has ended."""
        tasks = next(self._search, None)
        self.awaited = [] if tasks is None else list(tasks)
        return tasks is not None
