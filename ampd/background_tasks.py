"""Tasks of a process: work that outlives its call, work that never returns, and the rounds that are served now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
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


# -- Tasks that run as long as their process: an error is logged and the work starts again, so that none ends silently


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


# -- The rounds that a coordinator or a worker serves now


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
