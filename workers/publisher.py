"""Writes a worker's state to the shared state: its view, its finished prefills and the sessions it holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ampd.background_tasks import SupervisedTask
from ampd.state.known_worker import PUBLISH_INTERVAL_S, SAMPLE_INTERVAL_S, heartbeat_s
from ampd.state.redis_store import StateStore
from ampd.state.store import (
    RoleAssigned,
    StateRefusedError,
    StateUnavailableError,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.types import WorkerView
from workers.pending_changes import PendingChanges

log = logging.getLogger(__name__)
_HELD_INTERVAL_S = 50e-6
"""Least interval per held session that a view lists: about a microsecond per byte. One worker then publishes at most a
megabyte per second."""

_PREFILL_INTERVAL_S = 200e-6
"""The same per listed prefill."""


class Publisher:
    """Writes to the shared state in the background. Losing the state never stops the worker.

    Each publication carries the whole view with the held sessions, so that a state that lost its memory is complete
    again after the next publication.

    Structural changes (queue, batch, sessions) are written after at most `interval_s`, new samples after a quarter of a
    second, and the whole view at least every third of the lease. The interval grows with the size of the view, and the
    view of a long queue lists its first prefills only, so that load alone delays no renewal of the lease. A write that
    failed is repeated when the state is back. While the state refuses the view, it is announced as an event.

    Args:
        read_view: the worker's view now, without its held sessions (`changes` has those).
        on_return: called after a publication that came late. Until then calls to this worker may have failed.
        on_role: takes the assigned role, which each publication returns. Returns True if the role changed and must be
            published.
    """

    def __init__(
        self,
        store: StateStore,
        worker_id: str,
        read_view: Callable[[], WorkerView],
        changes: PendingChanges,
        lease_s: float,
        interval_s: float = PUBLISH_INTERVAL_S,
        on_role: Callable[[RoleAssigned], bool] = lambda _: False,
        on_return: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._read_view = read_view
        self._changes = changes
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._on_role = on_role
        self._on_return = on_return
        self._published_s = float("-inf")
        self._is_lost = False
        self._listed_prefills = 0
        self._renewals = 0
        self._task = SupervisedTask("publisher", self._run)
        self._write = asyncio.Lock()

    @property
    def available(self) -> bool:
        """Whether the last write to the shared state succeeded."""
        return not self._is_lost

    @property
    def renewals(self) -> int | None:
        """How often it published, or could not because of the state; None: it is not to publish."""
        return self._renewals if self._task.is_running else None

    async def start(self) -> None:
        """Publish once, then keep publishing.

        Raises:
            StateUnavailableError: the first publication failed.
        """
        async with self._write:
            await self._publish()
            self._task.start()

    def resume(self) -> None:
        """Publish again after `retire`."""
        if not self._task.is_running:
            self._changes.changed()
            self._task.start()

    async def retire(self) -> None:
        """Stop publishing and take this worker out of the shared state (if that does not answer, its lease ends it)."""
        # A publication that is broken off may reach the store after the removal, on another connection. Also the first.
        async with self._write:
            if not self._task.is_running:
                return
            await self._task.stop()
            self._published_s = float("-inf")
        try:
            await self._remove()
        except StateUnavailableError as error:
            log.warning("could not leave the shared state, the lease ends in %g s: %s", self._lease_s, error)

    async def _remove(self) -> None:
        try:
            await self._store.remove_worker(self._worker_id)
        except StateRefusedError:
            await self._store.announce(WorkerRemoved(self._worker_id))
            raise

    async def _run(self) -> None:
        while True:
            await self._wait()
            try:
                async with self._write:
                    await self._flush()
            except StateUnavailableError as error:
                if not self._is_lost:
                    log.error("the shared state is lost, serving goes on without it: %s", error)
                self._is_lost = True
                await asyncio.sleep(min(1.0, heartbeat_s(self._lease_s)))
            else:
                if self._is_lost:
                    log.warning("the shared state is back")
                self._is_lost = False
            self._renewals += 1

    async def _wait(self) -> None:
        """Wait until there is something to write: at least the interval, at most until the next heartbeat."""
        changes = self._changes
        size_s = _HELD_INTERVAL_S * len(changes.held_tokens) + _PREFILL_INTERVAL_S * self._listed_prefills
        interval_s = max(self._interval_s, min(size_s, heartbeat_s(self._lease_s)))
        pause_s = self._published_s + interval_s - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        due_s = self._published_s + heartbeat_s(self._lease_s)
        while (left_s := due_s - time.monotonic()) > 0:
            if changes.has_samples and time.monotonic() >= self._published_s + SAMPLE_INTERVAL_S:
                return
            if await changes.wait_changed(min(left_s, SAMPLE_INTERVAL_S)):
                return

    async def _flush(self) -> None:
        try:
            await self._publish()
        except StateRefusedError:
            # The store may be full or a replica. It still passes on events, by which coordinators see this worker.
            finished = tuple(self._changes.finished_tasks())
            await self._store.announce(WorkerUpdated(self._view(), self._lease_s, finished))
            raise
        except Exception:
            self._changes.changed()  # they are still to be written
            raise

    def _view(self) -> WorkerView:
        view = self._read_view()
        self._listed_prefills = len(view.queue)
        return replace(view, held_tokens=dict(self._changes.held_tokens))

    async def _publish(self) -> None:
        self._changes.clear()
        finished = self._changes.finished_tasks()
        role = await self._store.publish_worker(self._view(), self._lease_s, finished)
        self._changes.forget_finished(finished)
        published_s = time.monotonic()
        if self._on_return is not None and published_s > self._published_s + self._lease_s / 2:
            await self._on_return()
        self._published_s = published_s
        if role is not None and self._on_role(role):
            self._changes.changed()
