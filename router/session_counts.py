"""How many sessions a coordinator bound to decode workers, and moved between them."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[int, int], None]
"""Called with newly bound and newly moved sessions."""


class SessionCounts:
    """Counts since the start of the process, which metrics and `ampd top` show.

    Attributes:
        bound: sessions that this replica bound to a decode worker.
        moved: sessions that it moved to another decode worker because theirs was lost.
    """

    def __init__(self) -> None:
        self.bound = 0
        self.moved = 0
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` at each change from now on."""
        self._listeners.append(listener)

    def add(self, *, bound: int = 0, moved: int = 0) -> None:
        if not (bound or moved):
            return
        self.bound += bound
        self.moved += moved
        for listener in self._listeners:
            listener(bound, moved)
