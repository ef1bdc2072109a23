"""The local copy of the shared state that decisions read without I/O.

It starts from a snapshot and follows the store's events. While the store is lost, it keeps the last views and
reconnects with backoff. Leases do not expire during that time, because no worker can renew them. A fresh snapshot then
replaces the views. A worker that the snapshot lacks is kept for one more lease, because a restarted Redis is empty
until all workers have published again.

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
from dataclasses import dataclass, field, replace

from ampd.state.overlay import QUEUE_GRACE_S, REST_GRACE_S, merge
from ampd.state.store import (
    RoleAssigned,
    SessionEnded,
    StateEvent,
    StateStore,
    StateUnavailableError,
    TaskDone,
    TaskQueued,
    Watcher,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.supervised_task import SupervisedTask
from ampd.types import PrefillTask, Role, WorkerView

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0

_PROOF_SHARE = 0.5
"""Share of a lease after which a publication proves that the state is reachable for workers. They publish at least in
every third of a lease, so that all have fallen silent by then if their publications stop at the same time."""


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


@dataclass(slots=True)
class _Worker:
    """One worker.

    Attributes:
        published: the view that the worker published last.
        deadline_s: the end of its lease.
        proof_s: a publication of its role at this time or later proves that its own would have arrived.
        suspect_until_s: it is left out until then.
        entered: task id -> when a coordinator entered the prefill in its queue, and the prefill.
        done: task id -> when the prefill finished.
        held: session id -> held tokens that were reported since it published.
        merged: `published` with these changes; None if it must be merged again.
    """

    published: WorkerView
    deadline_s: float
    proof_s: float
    suspect_until_s: float = float("-inf")
    entered: dict[str, tuple[float, PrefillTask]] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    merged: WorkerView | None = None

    def renew(self, now_s: float, lease_s: float) -> None:
        self.deadline_s = now_s + lease_s
        self.proof_s = now_s + _PROOF_SHARE * lease_s

    def view(self) -> WorkerView:
        if self.merged is None:
            self.merged = merge(self.published, [task for _, task in self.entered.values()], self.done, self.held)
        return self.merged


class ClusterView:
    """The live workers, as of the last event. Use it as an async context manager, or call `start` and `stop`.

    Args:
        lease_s: lease of workers whose event names none.
        clock: the clock of the tasks' arrival times; monotonic.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = ViewCounters()
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._lists: dict[Role, tuple[WorkerView, ...]] | None = None
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
        """A live worker, or None if it is unknown, expired or suspect."""
        self._current()
        worker = self._workers.get(worker_id)
        if worker is None or worker.suspect_until_s > self._clock():
            return None
        return worker.view()

    def knows(self, worker_id: str) -> bool:
        """Whether a worker is in the shared state, be it suspect. A worker that shuts down leaves before it ends."""
        self._current()
        return worker_id in self._workers

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
        """Leave a worker out, because a call to it failed, until it publishes again or for `for_s` seconds."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.suspect_until_s = self._clock() + for_s
            self._lists = None

    def overdue(self) -> list[str]:
        """Workers whose lease is over, although nothing proves that they could have renewed it. Ask them."""
        self._expire(self._clock())
        return self._over(self._clock())

    def answered(self, worker_id: str) -> None:
        """A worker has answered a call: its lease begins again."""
        if worker := self._workers.get(worker_id):
            worker.renew(self._clock(), self._lease_s)

    def drop_overdue(self, worker_id: str) -> None:
        """Remove a worker whose lease is over, unless it has published meanwhile."""
        if worker_id in self._over(self._clock()):
            del self._workers[worker_id]
            self.counters.expired_workers += 1
            self._lists = None

    def decoding(self, worker_id: str, rounds: int, context_tokens: int) -> None:
        """Apply a worker's report of its decode batch until the worker publishes."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.published = replace(worker.published, decode_batch=rounds, decode_context_tokens=context_tokens)
            worker.merged = self._lists = None

    def holding(self, worker_id: str, session_id: str, tokens: int) -> None:
        """Apply a worker's report of the tokens of a session that it holds as KV until the worker publishes."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.held[session_id] = tokens
            worker.merged = self._lists = None

    def apply(self, event: StateEvent) -> None:
        """Apply an event of the store, or the reader's own write before the store repeats it: events are idempotent."""
        match event:
            case WorkerUpdated(view, lease_s):
                self._published_s[view.role] = self._clock()
                self._updated(view, self._lease_s if lease_s is None else lease_s)
                self._workers[view.worker_id].suspect_until_s = float("-inf")
            case WorkerRemoved(worker_id, is_expired):
                # The end of a lease is noticed here by the time since the last publication. The store's clock may have
                # jumped, and it may have refused the renewals of some workers, which were announced all the same.
                if not is_expired:
                    self._workers.pop(worker_id, None)
            case TaskQueued(worker_id, task):
                self._queued(worker_id, task)
            case TaskDone(worker_id, task_id):
                self._done(worker_id, task_id)
            case SessionEnded() | RoleAssigned():
                pass  # a worker's own views say what it holds and what its role is
        self._lists = None
        self.counters.events += 1

    def _updated(self, view: WorkerView, lease_s: float) -> None:
        now_s = self._clock()
        worker = self._workers.setdefault(view.worker_id, _Worker(view, now_s, now_s))
        worker.published = view
        worker.renew(now_s, lease_s)
        worker.held.clear()
        worker.merged = None
        # A task that the worker lists is gone when the worker no longer lists it.
        for task in view.queue:
            worker.entered.pop(task.task_id, None)
        # A task that it does not list was entered after this view was written, unless it was entered too long ago.
        has_rest = view.queue_rest.tasks > 0
        for task_id, (at_s, _) in list(worker.entered.items()):
            if now_s - at_s > (REST_GRACE_S if has_rest else QUEUE_GRACE_S):
                del worker.entered[task_id]
                self.counters.lost_tasks += not has_rest
        for task_id, at_s in list(worker.done.items()):
            if now_s - at_s > QUEUE_GRACE_S:
                del worker.done[task_id]

    def _queued(self, worker_id: str, task: PrefillTask) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or task.task_id in worker.entered:
            return
        worker.done.pop(task.task_id, None)
        worker.entered[task.task_id] = (self._clock(), task)
        worker.merged = None

    def _done(self, worker_id: str, task_id: str) -> None:
        if worker := self._workers.get(worker_id):
            worker.entered.pop(task_id, None)
            worker.done[task_id] = self._clock()
            worker.merged = None

    # -- the cached lists

    def _current(self) -> dict[Role, tuple[WorkerView, ...]]:
        now_s = self._clock()
        if self._lists is None or now_s >= self._recheck_s:
            self._lists = self._rebuilt(now_s)
        return self._lists

    def _rebuilt(self, now_s: float) -> dict[Role, tuple[WorkerView, ...]]:
        self._expire(now_s)
        lists: dict[Role, list[WorkerView]] = {role: [] for role in Role}
        self._recheck_s = float("inf")
        for worker in self._workers.values():
            if self.connected:
                self._recheck_s = min(self._recheck_s, worker.deadline_s)
            if worker.suspect_until_s > now_s:
                self._recheck_s = min(self._recheck_s, worker.suspect_until_s)
                continue
            lists[worker.published.role].append(worker.view())
        return {role: tuple(views) for role, views in lists.items()}

    def _expire(self, now_s: float) -> None:
        if self._store.refused_ago_s() < self._lease_s:
            return
        for worker_id in self._over(now_s):
            worker = self._workers[worker_id]
            if self._published_s[worker.published.role] >= worker.proof_s:
                self.drop_overdue(worker_id)

    def _over(self, now_s: float) -> list[str]:
        """The workers whose lease was over at the last sign of life of the store."""
        if self._watcher is None:
            return []
        # A store that is silent may have received the renewals that are missing here.
        heard_s = now_s - self._watcher.silent_s()
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
        for worker in self._workers.values():
            worker.renew(now_s, self._lease_s)
        for view in views:
            self._updated(view, self._lease_s)
        self._lists = None
