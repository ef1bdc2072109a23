"""What a coordinator reaches outside of its process: the shared state, its local copy, and the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.state.redis_store import StateStore
from ampd.state.store import Binding, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.wire import RoundReport
from router.calls import WorkerCalls
from router.round_errors import WorkerLostError, WorkerRefusedError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerAccess:
    """The workers and the shared state, as all rounds of a coordinator use them.

    Attributes:
        view: the local copy of the shared state.
        call_timeout_s: longest wait for an answer about KV.
    """

    view: ClusterView
    store: StateStore
    calls: WorkerCalls
    call_timeout_s: float

    async def matched_pages(self, worker_id: str, keys: Sequence[bytes]) -> int:
        """How many of the first `keys` a worker holds, in pages.

        Raises:
            WorkerLostError, WorkerRefusedError: the worker gave no answer.
        """
        reply = await self.calls.kv(worker_id, {"op": "match", "keys": list(keys)}, self.call_timeout_s)
        matched: object = reply.get("matched", 0)
        if type(matched) is not int or not 0 <= matched <= len(keys):
            raise WorkerRefusedError(worker_id, 502, f"worker {worker_id} says that it holds {matched!r:.50} pages")
        return matched

    async def lost(self, worker_id: str, message: str) -> WorkerLostError:
        """What it means that a worker tells and answers nothing more of its rounds.

        A connection that breaks looks the same if its worker died and if the network reset it. A worker that answers
        another call has not died, and keeps its rounds.
        """
        is_known = self.view.knows(worker_id)
        try:
            await self.matched_pages(worker_id, ())
        except (WorkerLostError, WorkerRefusedError):
            return WorkerLostError(worker_id, message, has_died=is_known)
        return WorkerLostError(worker_id, message, lives=True)

    def take_report(self, worker_id: str, session_id: str, report: RoundReport) -> None:
        """Apply a worker's report of what it holds and decodes, before the store repeats it.

        An agent without a tool to run sends its next round within milliseconds. By then the last one decodes no more.
        """
        batch = (report["decode_batch"], report["decode_context_tokens"]) if "decode_batch" in report else None
        self.view.holding(worker_id, session_id, report["held_tokens"], batch)

    async def finish_task(self, worker_id: str, task_id: str) -> None:
        """Take a task out of a worker's queue in the shared state."""
        try:
            await self.store.finish_tasks(worker_id, [task_id])
        except StateUnavailableError as error:
            log.debug("task %s stays entered until it expires: %s", task_id, error)

    async def end_session(self, session_id: str, tenant: str, used: set[str], *, is_unbound: bool = False) -> None:
        """End a session's binding, and at the same time release its KV on every worker that holds some.

        A worker that does not answer reads the end in the shared state when it comes back.

        Args:
            used: workers that served the session's last round; they may hold KV that the view does not show yet.
            is_unbound: the worker that ended the last round ends the binding.
        """
        workers = used | {view.worker_id for view in self.view.workers() if session_id in view.held_tokens}
        releases = [self.release(worker_id, session_id) for worker_id in workers]
        if is_unbound:
            await asyncio.gather(*releases)
            return
        bound, *_ = await asyncio.gather(self._delete_binding(session_id, tenant), *releases)
        if bound is not None and bound.worker_id not in workers:
            await self.release(bound.worker_id, session_id)

    async def _delete_binding(self, session_id: str, tenant: str) -> Binding | None:
        try:
            return await self.store.end_session(session_id, tenant)
        except StateUnavailableError as error:
            log.warning("session %r stays bound until its time to live ends: %s", session_id, error)
            return None

    async def release(self, worker_id: str, session_id: str) -> None:
        """Release the KV of a session at a worker. One that does not answer keeps it for now."""
        try:
            await self.calls.kv(worker_id, {"op": "release_session", "session_id": session_id}, self.call_timeout_s)
        except (WorkerLostError, WorkerRefusedError) as error:
            log.info("session %r was not released by a worker: %s", session_id, error)
        else:
            self.view.holding(worker_id, session_id, 0)


class LeaseProbe(InBackground):
    """Calls the overdue workers of a view: one that answers stays for another lease, one that does not is dropped.

    While the shared state is lost every worker is overdue after a lease, and a dropped worker is called again, because
    no publication can bring it back. A worker that has left to finish its rounds is overdue after each lease.

    Args:
        timeout_s: longest wait for an answer.
    """

    def __init__(self, view: ClusterView, calls: WorkerCalls, timeout_s: float, interval_s: float = 0.1) -> None:
        self._view = view
        self._calls = calls
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._task = SupervisedTask("lease-probe", self._run)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if overdue := self._view.overdue():
                async with asyncio.TaskGroup() as group:
                    for worker_id in overdue:
                        group.create_task(self._ask(worker_id))

    async def _ask(self, worker_id: str) -> None:
        try:
            await self._calls.kv(worker_id, {"op": "match", "keys": []}, self._timeout_s)
        except WorkerLostError as error:
            if self._view.knows(worker_id):
                log.warning("worker %s: its lease is over, and %s", worker_id, error)
            self._view.drop_overdue(worker_id)
        except WorkerRefusedError:
            self._view.answered(worker_id)
        else:
            self._view.answered(worker_id)
