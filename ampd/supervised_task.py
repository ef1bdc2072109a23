"""Tasks that run as long as their process: an error is logged and the work starts again, so that none ends silently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class SupervisedTask:
    """Runs work that never returns in a task of its own, from `start` to `stop`.

    Args:
        name: of the task, for the log.
        work: called again after each error; it must find its state in order.
        pause_s: seconds between an error and the next call.
    """

    def __init__(self, name: str, work: Callable[[], Awaitable[None]], pause_s: float = 0.5) -> None:
        self._name = name
        self._work = work
        self._pause_s = pause_s
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._task is not None

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel the work and wait for its end. Without effect unless it was started."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
                return
            except Exception:
                log.exception("%s failed; trying again", self._name)
            await asyncio.sleep(self._pause_s)


class InBackground:
    """A base of classes that only start and stop their task. A subclass sets `_task` in its constructor."""

    __slots__ = ("_task",)
    _task: SupervisedTask

    def start(self) -> None:
        """Begin the work, in the running event loop."""
        self._task.start()

    async def stop(self) -> None:
        """End the work. Without effect unless it was started."""
        await self._task.stop()
