"""Keeps the shared state in step with this worker: its view, finished prefills and the sessions it holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ampd.state.store import RoleAssigned, StateStore, StateUnavailableError
from ampd.types import WorkerView

_LOG = logging.getLogger(__name__)
_SAMPLE_INTERVAL_S = 0.25
"""How soon after new samples (TTFT, ITL, growing contexts) the view follows; structural changes are quicker."""
_MAX_FINISHED = 10_000
_HELD_INTERVAL_S = 50e-6
"""Added to the interval per held session: the view lists them all, and thousands are no longer a small message."""


class Publisher:
    """Writes to the shared state in the background; losing the state never stops the worker.

    The view carries the held sessions: one write says everything, and a state that lost its memory is whole again with
    the next.

    Structural changes (queue, batch, sessions) go out after at most `interval_s`, new samples after a quarter of a
    second, and the whole view at least every third of the lease. What could not be written is written when the state
    is back.

    Args:
        read_view: the worker's view now, without its held sessions (the publisher keeps those).
        on_role: takes the role that was assigned to this worker, which each publication brings back; whether it is a
            new one, and so to be published.
    """

    def __init__(
        self,
        store: StateStore,
        read_view: Callable[[], WorkerView],
        lease_s: float,
        interval_s: float = 0.025,
        on_role: Callable[[RoleAssigned], bool] = lambda _: False,
    ) -> None:
        self._store = store
        self._read_view = read_view
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._on_role = on_role
        self._held: dict[str, int] = {}
        self._finished: dict[str, None] = {}
        self._changed = asyncio.Event()
        self._sampled = False
        self._published_s = float("-inf")
        self._lost = False
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether the last write to the shared state succeeded."""
        return not self._lost

    @property
    def held_sessions(self) -> int:
        """Sessions whose KV this worker holds."""
        return len(self._held)

    # -- what the worker says; none of it waits

    def changed(self) -> None:
        """The queue, the batch or the KV changed."""
        self._changed.set()

    def sampled(self) -> None:
        """A window or a context grew."""
        self._sampled = True

    def held(self, session_id: str, tokens: int) -> None:
        """This worker now holds `tokens` of a session's context; 0: none any more."""
        if self._held.get(session_id, 0) == tokens:
            return
        if tokens:
            self._held[session_id] = tokens
        else:
            self._held.pop(session_id, None)
        self._changed.set()

    def finished(self, task_id: str) -> None:
        """A prefill has left this worker's queue."""
        self._finished[task_id] = None
        if len(self._finished) > _MAX_FINISHED:
            del self._finished[next(iter(self._finished))]
        self._changed.set()

    # -- the background

    async def start(self) -> None:
        """Publish once, then keep publishing.

        Raises:
            StateUnavailableError: the first publication failed.
        """
        await self._publish()
        self._task = asyncio.create_task(self._run(), name="publisher")

    async def retire(self) -> None:
        """Stop publishing and take this worker out of the shared state (if that does not answer, its lease ends it)."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        view = self._read_view()
        try:
            await self._store.remove_worker(view.worker_id)
        except StateUnavailableError as error:
            _LOG.warning("could not leave the shared state, the lease ends in %g s: %s", self._lease_s, error)

    async def _run(self) -> None:
        while True:
            await self._wait()
            try:
                await self._flush()
            except StateUnavailableError as error:
                if not self._lost:
                    _LOG.error("the shared state is lost, serving goes on without it: %s", error)
                self._lost = True
                await asyncio.sleep(min(1.0, self._lease_s / 3))
            except Exception:
                _LOG.exception("publishing failed; trying again")
                await asyncio.sleep(min(1.0, self._lease_s / 3))
            else:
                if self._lost:
                    _LOG.warning("the shared state is back")
                self._lost = False

    async def _wait(self) -> None:
        """Until there is something to write, but never longer than a heartbeat nor shorter than the interval."""
        pause_s = self._published_s + max(self._interval_s, _HELD_INTERVAL_S * len(self._held)) - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        heartbeat_s = self._published_s + self._lease_s / 3
        while (left_s := heartbeat_s - time.monotonic()) > 0:
            if self._sampled and time.monotonic() >= self._published_s + _SAMPLE_INTERVAL_S:
                return
            try:
                async with asyncio.timeout(min(left_s, _SAMPLE_INTERVAL_S)):
                    await self._changed.wait()
                return
            except TimeoutError:
                continue

    async def _flush(self) -> None:
        worker_id = self._read_view().worker_id
        for task_id in list(self._finished):
            await self._store.finish_task(worker_id, task_id)
            self._finished.pop(task_id, None)
        await self._publish()

    async def _publish(self) -> None:
        self._sampled = False
        self._changed.clear()
        view = replace(self._read_view(), held_tokens=dict(self._held))
        role = await self._store.publish_worker(view, self._lease_s)
        self._published_s = time.monotonic()
        if role is not None and self._on_role(role):
            self._changed.set()
