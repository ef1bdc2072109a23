"""Work that outlives the call that started it, such as the release of a session or the return of a lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Runs work in tasks of its own, and keeps them from being collected before they end.

    Args:
        most: tasks at the same time. Work beyond them is dropped, so set it only if the work may be left undone. None:
            no bound.

    Attributes:
        dropped: work that was not done, because too much was under way.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[object]] = set()
        self.dropped = 0

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Start work. Its errors are logged."""
        if self._most is not None and len(self._tasks) >= self._most:
            work.close()
            if not self.dropped:
                log.warning("more than %d tasks in the background: further work is dropped", self._most)
            self.dropped += 1
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self, timeout_s: float) -> None:
        """Wait for all work, at most for `timeout_s`, then cancel what still runs."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()

    async def cancel(self) -> None:
        """Cancel what still runs, and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
