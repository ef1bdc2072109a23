"""The order in which SGLang takes offloads back.

SGLang takes completed offloads strictly in the order in which they were made. Pins are released in any order, so the
pending offloads are sorted: released ones first.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import count
from typing import Any


class OffloadOrder:
    """The numbers of the offloads that SGLang still waits for, in the order of SGLang's own list.

    Attributes:
        completed: how many offloads at the front may be taken back.
    """

    def __init__(self) -> None:
        self.completed = 0
        self._next = count()
        self._order: list[int] = []

    def add(self) -> int:
        """A new offload; returns its number."""
        number = next(self._next)
        self._order.append(number)
        return number

    def release(self, numbers: AbstractSet[int], pending: list[Any]) -> None:
        """Move released offloads to the front, in our list and in SGLang's list `pending`."""
        waiting = range(self.completed, len(self._order))
        order = [*range(self.completed), *sorted(waiting, key=lambda at: self._order[at] not in numbers)]
        self.completed += sum(self._order[at] in numbers for at in waiting)
        pending[:] = [pending[at] for at in order]
        self._order = [self._order[at] for at in order]

    def pop(self) -> None:
        """SGLang took the first offload back."""
        self.completed -= 1
        self._order.pop(0)

    def clear(self) -> None:
        """Forget all offloads; numbers are not used again."""
        self.completed = 0
        self._order.clear()
