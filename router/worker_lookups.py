"""Workers that this coordinator has not heard of yet, looked up in the shared state."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ampd.state.redis_store import StateStore
from ampd.types import WorkerView


class WorkerLookups:
    """Looks workers up, once for all rounds that ask for the same one at the same time.

    A dead worker has thousands of sessions, and each snapshot holds the whole cluster. Rounds that ask for different
    workers share nothing, because a snapshot that began before a worker was published does not have it.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._running: dict[str, asyncio.Task[WorkerView | None]] = {}

    async def find(self, worker_id: str) -> WorkerView | None:
        """The worker's view in the shared state; None: it has none.

        Raises:
            StateUnavailableError: the shared state does not answer.
        """
        task = self._running.get(worker_id)
        if task is None:
            task = self._running[worker_id] = asyncio.create_task(self._look_up(worker_id))
            task.add_done_callback(lambda ended: self._ended(worker_id, ended))
        return await asyncio.shield(task)  # a round that ends must not end the look-up of the others

    async def _look_up(self, worker_id: str) -> WorkerView | None:
        return next((view for view in await self._store.snapshot() if view.worker_id == worker_id), None)

    def _ended(self, worker_id: str, task: asyncio.Task[WorkerView | None]) -> None:
        del self._running[worker_id]
        with suppress(asyncio.CancelledError):
            task.exception()  # all rounds that wait for it may have ended
