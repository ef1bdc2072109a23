"""Work that goes on after the call that began it, such as the return of a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class LateWork:
    """Keeps tasks from being collected before they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Cancel what still goes on, and wait for its end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
