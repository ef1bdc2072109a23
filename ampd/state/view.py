"""The local copy of the shared state that decisions read without I/O.

It starts from a snapshot and follows the store's events. While the store is lost, it keeps the last views and
reconnects with backoff. Leases do not expire during that time, because no worker can renew them. The queues of the last
views are forgotten, because workers go on. The reader enters and takes out its own prefills, so that its admission
knows them. A fresh snapshot then replaces the views. A worker that the snapshot lacks is kept for one more lease,
because a restarted Redis is empty until all workers have published again.

The end of a lease alone does not remove a worker. Another worker of its role must have published shortly before, which
proves that publications arrive. While the store refuses commands of this process, it may refuse the publications of
some workers only, and that is no proof. A worker without the proof is `overdue`: it stays until a call to it fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from ampd.background_tasks import SupervisedTask
from ampd.perf.model import PerformanceModel
from ampd.state.known_worker import KnownWorker
from ampd.state.redis_store import StateStore, Watcher
from ampd.state.store import (
    RoleAssigned,
    SessionEnded,
    StateEvent,
    StateUnavailableError,
    TaskDone,
    TaskQueued,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.types import Role, WorkerView

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0


@dataclass(slots=True)
class ViewCounters:
    """Counts of a view since it was made, for metrics.

    Attributes:
        events: events applied.
        losses: times that the store was lost.
        expired_workers: workers whose lease expired.
        lost_tasks: prefills that were entered but never listed by their worker.
    """

    events: int = 0
    losses: int = 0
    expired_workers: int = 0
    lost_tasks: int = 0


class ClusterView:
    """The live workers, as of the last event. Use it as an async context manager, or call `start` and `stop`.

    Args:
        lease_s: lease of workers whose event names none.
        clock: the clock of the tasks' arrival times; monotonic.
        model: predicts the times of queues when they arrive.
        serves: whether a worker that has just published itself can serve the reader's rounds. Others are left out.
        on_session_end: gets the ids of sessions that ended, at any coordinator.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        model: PerformanceModel | None = None,
        serves: Callable[[WorkerView], bool] = lambda _: True,
        on_session_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.counters = ViewCounters()
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._model = model
        self._serves = serves
        self._on_session_end = on_session_end
        self._workers: dict[str, KnownWorker] = {}
        self._given_up: dict[str, KnownWorker] = {}
        self._leaving: dict[str, KnownWorker] = {}
        self._lists: dict[Role, tuple[WorkerView, ...]] | None = None
        self._places: dict[str, int] = {}
        self._stale = set[str]()
        self._recheck_s = float("inf")
        self._published_s = dict.fromkeys(Role, float("-inf"))
        self._watcher: Watcher | None = None
        self._fresh_s = float("-inf")
        self._task = SupervisedTask("cluster-view", self._follow)

    # -- life

    async def start(self) -> None:
        """Take the first snapshot and follow from there.

        Raises:
            StateUnavailableError: the store does not answer.
        """
        await self._connect()
        self._task.start()

    async def stop(self) -> None:
        """Stop following the store; the last views stay readable."""
        await self._task.stop()
        await self._disconnect()

    async def __aenter__(self) -> ClusterView:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- what decisions read

    def decode(self) -> tuple[WorkerView, ...]:
        """Live workers that own sessions: decode and mixed workers."""
        return self.of_role(Role.DECODE) + self.of_role(Role.MIXED)

    def prefill(self) -> tuple[WorkerView, ...]:
        """Live workers that take prefills of sessions that others own: prefill and mixed workers."""
        return self.of_role(Role.PREFILL) + self.of_role(Role.MIXED)

    def workers(self) -> tuple[WorkerView, ...]:
        """All live workers, each once."""
        return self.prefill() + self.of_role(Role.DECODE)

    def of_role(self, role: Role) -> tuple[WorkerView, ...]:
        """Live workers of one role."""
        return self._current()[role]

    def worker(self, worker_id: str) -> WorkerView | None:
        """A live worker, or None if it is unknown, expired or left out, or cannot serve the reader's rounds."""
        self._current()
        return self._workers[worker_id].view() if worker_id in self._places else None

    def serves(self, worker: WorkerView) -> bool:
        """Whether a worker of the shared state can serve the reader's rounds."""
        return self._serves(worker)

    def knows(self, worker_id: str) -> bool:
        """Whether a worker is in the shared state, even if it is suspect.

        A worker that shuts down leaves before it ends.
        """
        self._current()
        return worker_id in self._workers

    def lives(self, worker_id: str) -> bool:
        """Whether a worker is in the shared state, or has left it by itself and may still finish its rounds."""
        return self.knows(worker_id) or worker_id in self._leaving

    @property
    def _is_lost(self) -> bool:
        """Whether the store's events arrive no more. A copy that never followed a store has not lost it."""
        return self._watcher is None and self._fresh_s > float("-inf")

    @property
    def connected(self) -> bool:
        """Whether the store's events arrive."""
        return self._watcher is not None

    def age_s(self) -> float:
        """Seconds since the view was last known to agree with the store."""
        if self._watcher is not None:
            return self._watcher.silent_s()
        return self._clock() - self._fresh_s

    # -- what the reader knows before the store

    def suspect(self, worker_id: str, for_s: float) -> None:
        """Leave a worker out, because a call to it failed, until it publishes again or for `for_s` seconds.

        It stays while no other worker has its role: one failed call proves no death, and nobody could take its place.
        """
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.suspect_until_s = self._clock() + for_s
            self._lists = None

    def overdue(self) -> list[str]:
        """Workers whose lease is over, although nothing proves that they could have renewed it. Ask them.

        While the store is lost, those that were dropped meanwhile are among them. So are those that have left by
        themselves, because they publish no more.
        """
        now_s = self._clock()
        self._expire(now_s)
        leaving = [worker_id for worker_id, worker in self._leaving.items() if worker.deadline_s <= now_s]
        return [*self._over(now_s), *self._given_up, *leaving]

    def answered(self, worker_id: str) -> None:
        """A worker has answered a call: its lease begins again."""
        if returned := self._given_up.pop(worker_id, None):
            self._workers[worker_id] = returned
            self._lists = None
        if worker := self._workers.get(worker_id) or self._leaving.get(worker_id):
            worker.renew(self._clock(), self._lease_s)

    def drop_overdue(self, worker_id: str) -> None:
        """Remove a worker whose lease is over, unless it has published meanwhile."""
        self._leaving.pop(worker_id, None)
        if worker_id in self._over(self._clock()):
            worker = self._workers.pop(worker_id)
            if self._watcher is None:
                self._given_up[worker_id] = worker
            self.counters.expired_workers += 1
            self._lists = None

    def holding(self, worker_id: str, session_id: str, tokens: int, batch: tuple[int, int] | None = None) -> None:
        """Apply a worker's report until the worker publishes.

        Args:
            tokens: of the session, that it holds as KV.
            batch: the rounds of its decode batch, and their tokens; None: it has not told.
        """
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.hold(session_id, tokens, batch)
            self._stale.add(worker_id)

    def apply(self, event: StateEvent) -> None:
        """Apply an event of the store, or the reader's own write before the store repeats it: events are idempotent."""
        match event:
            case WorkerUpdated(view, lease_s, done):
                self._published_s[view.role] = self._clock()
                updated = self._updated(view, self._lease_s if lease_s is None else lease_s)
                if updated.suspect_until_s > float("-inf"):
                    updated.suspect_until_s, self._lists = float("-inf"), None
                for task_id in done:
                    updated.finish(task_id, self._clock())
            case WorkerRemoved(worker_id, is_expired):
                # The end of a lease is noticed here by the time since the last publication. The store's clock may have
                # jumped, and it may have refused the renewals of some workers, which were announced all the same.
                if not is_expired and (worker := self._workers.pop(worker_id, None)):
                    self._leaving[worker_id] = worker
                self._lists = None
            case TaskQueued(worker_id, task):
                if worker := self._workers.get(worker_id):
                    worker.enter(task, self._clock())
                    self._stale.add(worker_id)
            case TaskDone(worker_id, task_id):
                if worker := self._workers.get(worker_id):
                    worker.finish(task_id, self._clock())
                    self._stale.add(worker_id)
            case SessionEnded(session_id):
                self._on_session_end(session_id)  # a worker's own views say what it holds
            case RoleAssigned():
                pass  # a worker's own views say what its role is
        self.counters.events += 1

    def _updated(self, view: WorkerView, lease_s: float) -> KnownWorker:
        now_s = self._clock()
        self._leaving.pop(view.worker_id, None)
        worker = self._workers.get(view.worker_id)
        fits = self._serves(view)
        if worker is None or (worker.fits, worker.published.role) != (fits, view.role):
            self._lists = None
        if worker is None:
            worker = self._workers[view.worker_id] = KnownWorker(view, self._model)
        else:
            lost_tasks = worker.publish(view, now_s)
            # A snapshot after a loss says nothing of them: its views may be older than the loss.
            self.counters.lost_tasks += 0 if self._is_lost else lost_tasks
        worker.fits = fits
        worker.renew(now_s, lease_s)
        self._stale.add(view.worker_id)
        return worker

    # -- the cached lists

    def _current(self) -> dict[Role, tuple[WorkerView, ...]]:
        now_s = self._clock()
        if self._lists is None or now_s >= self._recheck_s:
            self._lists = self._rebuilt(now_s)
        elif self._stale:
            self._renew(self._lists)
        self._stale.clear()
        return self._lists

    def _renew(self, lists: dict[Role, tuple[WorkerView, ...]]) -> None:
        """Renew the views of which more has been heard. Who is listed has not changed."""
        changed: dict[Role, list[WorkerView]] = {}
        for worker_id in self._stale & self._places.keys():
            view = self._workers[worker_id].view()
            if view.role not in changed:
                changed[view.role] = list(lists[view.role])
            changed[view.role][self._places[worker_id]] = view
        lists.update((role, tuple(views)) for role, views in changed.items())

    def _rebuilt(self, now_s: float) -> dict[Role, tuple[WorkerView, ...]]:
        self._expire(now_s)
        self._recheck_s = float("inf")
        trusted: list[KnownWorker] = []
        suspects: list[KnownWorker] = []
        for worker in self._workers.values():
            if self.connected:
                self._recheck_s = min(self._recheck_s, worker.deadline_s)
            if worker.suspect_until_s > now_s:
                self._recheck_s = min(self._recheck_s, worker.suspect_until_s)
            if worker.fits:
                (suspects if worker.suspect_until_s > now_s else trusted).append(worker)
        lists: dict[Role, list[WorkerView]] = {role: [] for role in Role}
        for worker in trusted + _without_substitute(suspects, trusted):
            lists[worker.published.role].append(worker.view())
        before = self._places.keys()
        self._places = {view.worker_id: place for views in lists.values() for place, view in enumerate(views)}
        for worker_id in before - self._places.keys():
            log.warning(
                "worker %s leaves the view: %s; left: %s",
                worker_id,
                self._why_gone(worker_id),
                ", ".join(f"{len(views)} {role}" for role, views in lists.items() if views) or "none",
            )
        return {role: tuple(views) for role, views in lists.items()}

    def _why_gone(self, worker_id: str) -> str:
        if worker_id in self._leaving:
            return "it has left by itself"
        if (worker := self._workers.get(worker_id)) is None:
            return "its lease is over, and it does not answer or others publish"
        return "a call to it failed" if worker.fits else "it does not fit this coordinator"

    def _expire(self, now_s: float) -> None:
        if self._watcher is None or self._store.refused_ago_s() < self._lease_s:
            return
        for worker_id in self._over(now_s):
            worker = self._workers[worker_id]
            if self._published_s[worker.published.role] >= worker.proof_s:
                self.drop_overdue(worker_id)

    def _over(self, now_s: float) -> list[str]:
        """The workers whose lease was over at the last sign of life of the store; while it is lost, those of now."""
        # A store that is silent may have received the renewals that are missing here.
        heard_s = now_s - self._watcher.silent_s() if self._watcher else now_s
        return [worker_id for worker_id, worker in self._workers.items() if worker.deadline_s <= heard_s]

    # -- following the store

    async def _follow(self) -> None:
        while True:
            if self._watcher is None:
                await self._reconnect()
            assert self._watcher is not None
            try:
                async for event in self._watcher:
                    self.apply(event)
            except StateUnavailableError as error:
                log.warning("%s; serving the last view", error)
            finally:
                await self._disconnect()
            self.counters.losses += 1
            for worker in self._workers.values():
                worker.forget_queue()
            self._lists = None

    async def _reconnect(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            try:
                await self._connect()
            except StateUnavailableError:
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                continue
            log.warning("shared state is back after %.1f s", self._clock() - self._fresh_s)
            return

    async def _connect(self) -> None:
        watcher = self._store.watch()
        try:
            await watcher.start()
            views = await self._store.snapshot()
        except BaseException:
            await watcher.aclose()
            raise
        self._reset(views)
        self._watcher = watcher

    async def _disconnect(self) -> None:
        watcher, self._watcher = self._watcher, None
        self._lists = None
        if watcher is not None:
            self._fresh_s = self._clock() - watcher.silent_s()
            await watcher.aclose()

    def _reset(self, views: list[WorkerView]) -> None:
        now_s = self._clock()
        self._given_up.clear()
        for worker in self._workers.values():
            worker.renew(now_s, self._lease_s)
        for view in views:
            self._updated(view, self._lease_s)
        self._lists = None


def _without_substitute(suspects: list[KnownWorker], trusted: list[KnownWorker]) -> list[KnownWorker]:
    """The suspects that do something that no trusted worker does: own sessions, or prefill for others."""
    needs_owner = not any(worker.published.role.owns_sessions for worker in trusted)
    needs_prefills = not any(worker.published.role.takes_prefills for worker in trusted)
    return [
        worker
        for worker in suspects
        if (needs_owner and worker.published.role.owns_sessions)
        or (needs_prefills and worker.published.role.takes_prefills)
    ]
