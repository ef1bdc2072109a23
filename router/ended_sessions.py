"""Sessions that ended while the shared state or one of their workers did not answer: the rest of their end follows.

A worker that is silent for a while is in no view. When it comes back, it still holds the KV of sessions that were moved
away from it and have ended since.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from ampd.state.store import StateStore, StateUnavailableError
from ampd.supervised_task import InBackground, SupervisedTask
from ampd.types import WorkerView
from router.round_errors import WorkerLostError, WorkerRefusedError

RETRY_S = 1.0

WORKER_RETURNS_S = 600.0
"""For this long a worker that did not answer may come back and still hold KV of a session."""

_MOST = 10_000
"""Sessions that are remembered at most, of each kind. What is left of others expires with the TTL of sessions."""

Release = Callable[[str, str], Awaitable[None]]
"""Releases the KV of a session: called with the worker's and the session's id."""


class EndedSessions(InBackground):
    """Deletes bindings until the shared state has done it, and releases KV until its worker has done it.

    A session may begin again under its old id before that. This replica then leaves its binding alone. If another
    replica has bound it, the binding is deleted; the session's next round binds it again.

    Args:
        release: may raise `WorkerLostError` and `WorkerRefusedError`.
        workers: those that can be called now; others are left alone.
        has_heard: whether a worker has published since its events arrive. If not, what it holds now is not known.
    """

    def __init__(
        self,
        store: StateStore,
        release: Release,
        workers: Callable[[], Iterable[WorkerView]],
        has_heard: Callable[[str], bool] = lambda _: True,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._release = release
        self._workers = workers
        self._has_heard = has_heard
        self._retry_s = retry_s
        self._clock = clock
        self._tenants: OrderedDict[str, str] = OrderedDict()
        self._holders: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._present: set[str] = set()
        self._has_some = asyncio.Event()
        self._task = SupervisedTask("ended-sessions", self._run)

    def __len__(self) -> int:
        return len(self._tenants) + len(self._holders)

    def still_bound(self, session_id: str, tenant: str) -> None:
        """The binding of a session could not be deleted."""
        self._tenants[session_id] = tenant
        if len(self._tenants) > _MOST:
            self._tenants.popitem(last=False)
        self._has_some.set()

    def still_held(self, session_id: str, worker_id: str) -> None:
        """A worker that holds KV of a session could not be called."""
        self._holders.setdefault(session_id, {})[worker_id] = self._clock() + WORKER_RETURNS_S
        if len(self._holders) > _MOST:
            self._holders.popitem(last=False)
        self._has_some.set()

    def ended(self, session_id: str) -> None:
        """A session ends: workers that are not there now release it when they come back.

        Only a round at this replica takes it out again. If the session goes on at another one, such a worker loses its
        KV, and computes it again for the next round there.
        """
        present = set(filter(self._has_heard, self._callable()))
        self._present = self._present & present if self._ended else present
        self._ended[session_id] = self._clock() + WORKER_RETURNS_S
        self._ended.move_to_end(session_id)
        if len(self._ended) > _MOST:
            self._ended.popitem(last=False)
        self._has_some.set()

    def is_over(self, session_id: str) -> bool:
        """Whether a session has ended lately, and no round of it has begun here since."""
        return session_id in self._ended

    def begins(self, session_id: str) -> bool:
        """A round of the session begins, so that it lives. Returns whether it had ended lately."""
        self._tenants.pop(session_id, None)
        self._holders.pop(session_id, None)
        return self._ended.pop(session_id, None) is not None

    async def _run(self) -> None:
        while True:
            await self._has_some.wait()
            await asyncio.sleep(self._retry_s)
            await self._delete_bindings()
            self._find_returned()
            await self._release_kv()
            if not len(self) and not self._ended:
                self._has_some.clear()

    async def _delete_bindings(self) -> None:
        while self._tenants:
            session_id, tenant = next(iter(self._tenants.items()))
            try:
                await self._store.end_session(session_id, tenant)
            except StateUnavailableError:
                return
            self._tenants.pop(session_id, None)

    def _find_returned(self) -> None:
        """Note the ended sessions of workers that have come, or come back, since the last time.

        After a loss of the shared state all come back, each with its first publication.
        """
        while self._ended and next(iter(self._ended.values())) <= self._clock():
            self._ended.popitem(last=False)
        views = {view.worker_id: view for view in self._workers() if self._has_heard(view.worker_id)}
        for worker_id in views.keys() - self._present:
            for session_id in views[worker_id].held_tokens.keys() & self._ended.keys():
                self.still_held(session_id, worker_id)
        self._present = set(views)

    def _callable(self) -> set[str]:
        return {view.worker_id for view in self._workers()}

    async def _release_kv(self) -> None:
        present = self._callable()
        for session_id, workers in list(self._holders.items()):
            for worker_id, until_s in list(workers.items()):
                if session_id not in self._holders:
                    break  # it has begun again
                if await self._is_released(session_id, worker_id, present) or until_s <= self._clock():
                    del workers[worker_id]
            if not workers and self._holders.get(session_id) is workers:
                del self._holders[session_id]

    async def _is_released(self, session_id: str, worker_id: str, present: set[str]) -> bool:
        """Try it. A worker that does not answer leaves `present`, so that it costs one timeout and not many."""
        if worker_id not in present:
            return False
        try:
            await self._release(worker_id, session_id)
        except WorkerLostError:
            present.discard(worker_id)
            return False
        except WorkerRefusedError:
            return False
        return True
