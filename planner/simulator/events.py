"""Virtual time: actions that run in the order of their times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Once:
    """An action that is entered for several times. It runs at the first of them, unless it is cancelled before."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, _: object = None) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def cancel(self) -> None:
        """Never run it."""
        self._action = None


class EventLoop:
    """Runs actions at their times; actions with equal times run in the order of their entry.

    Attributes:
        now_s: virtual time.
        handled: actions run so far.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, when_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Run `action(argument)` at a time that has not passed.

        An action cannot be cancelled: it checks on its own whether it is still due.

        Raises:
            ValueError: the time has passed, so that the effect would come before its cause.
        """
        if when_s < self.now_s:
            raise ValueError(f"it is {self.now_s} s, nothing can be done at {when_s} s any more")
        self._count += 1
        # No two have the same number, so actions are never compared.
        heappush(self._heap, (when_s, self._count, action, argument))

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Callable[[], None]:
        """Run `action()` after a delay, unless the returned function is called before."""
        once = Once(action)
        self.at(self.now_s + delay_s, once)
        return once.cancel

    def clock(self) -> float:
        """The virtual time, as a clock function."""
        return self.now_s

    def run(self, until_s: float = inf) -> None:
        """Run until no action is left, or only later ones than `until_s`."""
        heap = self._heap
        while heap:
            if heap[0][0] > until_s:
                return
            self.now_s, _, action, argument = heappop(heap)
            self.handled += 1
            action(argument)
