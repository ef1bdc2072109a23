"""The rounds that a coordinator or a worker serves now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RoundsInProgress:
    """Counts the rounds."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return self._count

    def begin(self) -> None:
        """A round begins. `end` must follow, however the round ends."""
        self._count += 1
        self._idle.clear()

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    @contextmanager
    def round(self) -> Iterator[None]:
        """A round is in progress during the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def drained(self) -> None:
        """Wait until there is none."""
        await self._idle.wait()
