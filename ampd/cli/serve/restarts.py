"""When a process of a graph that has ended by itself starts again."""

from __future__ import annotations

FIRST_PAUSE_S = 0.5
"""Each further one is twice as long."""
MOST = 5
"""Restarts one after the other."""
LASTING_S = 60.0
"""A process that ran for so long had started well."""


class Restarts:
    """Counts the ends of one process, and gives it up if it keeps ending soon after its start.

    Args:
        started_s: when it started.
    """

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._count = 0

    def pause_s(self, ended_s: float) -> float | None:
        """The pause before the process starts again, which ended at this time; None: it does not start again."""
        if ended_s - self._started_s >= LASTING_S:
            self._count = 0
        if self._count >= MOST:
            return None
        pause_s = FIRST_PAUSE_S * 2.0**self._count
        self._count += 1
        self._started_s = ended_s + pause_s
        return pause_s
