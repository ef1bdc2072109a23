"""Virtual time: actions that run in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Once:
    """An action that is entered for several times. It runs at the first of them, unless it is cancelled before."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self, _: object = None) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def cancel(self) -> None:
        """Never run it."""
        self._action = None


class _Event:
    """An action that waits for its time.

    It is no tuple, because a compiled one has its numbers in itself and compares them faster.
    """

    __slots__ = ("action", "argument", "number", "when_s")

    def __init__(self, when_s: float, number: int, action: Callable[[Any], None], argument: Any) -> None:
        self.when_s = when_s
        self.number = number
        self.action = action
        self.argument = argument

    def __lt__(self, other: _Event) -> bool:
        if self.when_s != other.when_s:
            return self.when_s < other.when_s
        return self.number < other.number


class EventLoop:
    """Runs actions at their times; actions with equal times run in the order of their entry.

    Attributes:
        now_s: virtual time.
        handled: actions run so far.
    """

    __slots__ = ("_count", "_heap", "handled", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.handled = 0
        self._heap: list[_Event] = []
        self._count = 0

    def at(self, when_s: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Run `action(argument)` at a time that has not passed.

        An action cannot be cancelled: it checks on its own whether it is still due.

        Raises:
            ValueError: the time has passed, so that the effect would come before its cause.
        """
        self._check(when_s)
        self._count += 1
        heappush(self._heap, _Event(when_s, self._count, action, argument))

    def at_each(self, action: Callable[[Any], None], arguments: Iterable[tuple[float, Any]]) -> None:
        """Run `action(argument)` at each of many times, as if `at` was called for one after the other.

        Only the first of them waits among the other actions, so that these are found faster.

        Raises:
            ValueError: a time has passed.
        """
        entries = [(when_s, self._count + place, argument) for place, (when_s, argument) in enumerate(arguments, 1)]
        self._count += len(entries)
        # No two have the same number, so arguments are never compared.
        entries.sort(reverse=True)
        self._enter_next(action, entries)

    def _enter_next(self, action: Callable[[Any], None], entries: list[tuple[float, int, Any]]) -> None:
        """Enter the last of the entries. It enters the one before it when its time has come."""
        if not entries:
            return
        when_s, number, argument = entries.pop()
        self._check(when_s)

        def run(_: object) -> None:
            self._enter_next(action, entries)
            action(argument)

        heappush(self._heap, _Event(when_s, number, run, None))

    def _check(self, when_s: float) -> None:
        if when_s < self.now_s:
            raise ValueError(f"it is {self.now_s} s, nothing can be done at {when_s} s any more")

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
            event = heappop(heap)
            if event.when_s > until_s:
                heappush(heap, event)
                return
            self.now_s = event.when_s
            self.handled += 1
            event.action(event.argument)
