"""What a coordinator reaches outside of its process: the shared state, its local copy, and the workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ampd.errors import one_line_of
from ampd.state.store import Binding, DeathNews, StateStore, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.wire import RoundReport, parse_error
from router.calls import WorkerCalls, worker_error
from router.ended_sessions import EndedSessions
from router.guard import StreamGuard
from router.round_errors import WorkerLostError, WorkerRefusedError
from router.worker_reports import WorkerReports

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerAccess:
    """The workers and the shared state, as all rounds of a coordinator use them.

    Attributes:
        view: the local copy of the shared state.
        guard: gives up calls to workers that hang.
        ended: sessions whose end must still be written.
        call_timeout_s: longest wait for an answer about KV.
        reports: reads the workers' reports about rounds.
    """

    view: ClusterView
    store: StateStore
    calls: WorkerCalls
    guard: StreamGuard
    ended: EndedSessions
    call_timeout_s: float
    reports: WorkerReports = field(default_factory=WorkerReports)

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

    async def failure(
        self, worker_id: str, error: Exception, *, has_begun: bool
    ) -> WorkerLostError | WorkerRefusedError:
        """What a failed call says about its worker.

        A stream that breaks off looks the same if its worker died and if the network reset its connection. A worker
        that answers another call has not died, and keeps its rounds.

        Args:
            has_begun: the worker had taken the call, whose client is still there.
        """
        failure = worker_error(worker_id, error, has_died=has_begun and self.view.knows(worker_id))
        is_explained = failure is error or parse_error(str(error)) is not None
        if has_begun and not is_explained:
            with suppress(WorkerLostError, WorkerRefusedError):
                await self.matched_pages(worker_id, ())
                return WorkerLostError(worker_id, f"its connection broke: {one_line_of(error)}", lives=True)
        return failure

    def take_report(self, worker_id: str, session_id: str, report: RoundReport) -> None:
        """Apply a worker's report of what it holds and decodes, before the store repeats it.

        An agent without a tool to run sends its next round within milliseconds. By then the last one decodes no more.
        """
        self.view.holding(worker_id, session_id, report["held_tokens"])
        if "decode_batch" in report:
            self.view.decoding(worker_id, report["decode_batch"], report["decode_context_tokens"])

    async def announce(self, news: DeathNews) -> None:
        """Tell the other coordinators what has become of a request."""
        try:
            await self.store.announce(news)
        except StateUnavailableError as error:
            log.debug("the other coordinators do not learn of %s: %s", news, error)

    async def finish_task(self, worker_id: str, task_id: str) -> None:
        """Take a task out of a worker's queue in the shared state."""
        try:
            await self.store.finish_tasks(worker_id, [task_id])
        except StateUnavailableError as error:
            log.debug("task %s stays entered until it expires: %s", task_id, error)

    async def leave_session(self, worker_id: str, session_id: str) -> None:
        """Release the KV of a session at an owner that it has left. A worker that does not answer keeps it for now."""
        try:
            await release_session(self.calls, worker_id, session_id, self.call_timeout_s)
        except (WorkerLostError, WorkerRefusedError) as error:
            log.info("session %r was not released at its old owner: %s", session_id, error)
        else:
            self.view.holding(worker_id, session_id, 0)

    async def end_session(self, session_id: str, tenant: str, used: set[str], *, is_named: bool = True) -> None:
        """End a session's binding, and release its KV on every worker that holds some.

        Args:
            used: workers that served the session's last round; they may hold KV that the view does not show yet.
            is_named: False: the session was a single round, so that no other worker holds KV of it.
        """
        if is_named:
            self.ended.ended(session_id)
        failure: StateUnavailableError | None = None
        bound: Binding | None = None
        try:
            bound = await self.store.end_session(session_id, tenant)
        except StateUnavailableError as error:
            failure = error
        if is_named and not self.ended.is_over(session_id):
            return  # it has begun again meanwhile, and what is left of it belongs to its new life
        if failure is not None:
            self.ended.still_bound(session_id, tenant)
            log.warning("session %r stays bound until the shared state is back: %s", session_id, failure)
        workers = used | {view.worker_id for view in self.view.workers() if session_id in view.held_tokens}
        if bound is not None:
            workers.add(bound.worker_id)
        for worker_id in workers:
            try:
                await release_session(self.calls, worker_id, session_id, self.call_timeout_s)
            except (WorkerLostError, WorkerRefusedError) as error:
                self.ended.still_held(session_id, worker_id)
                log.info("session %r was not released at once: %s", session_id, error)


async def release_session(calls: WorkerCalls, worker_id: str, session_id: str, timeout_s: float) -> None:
    """Release the KV of a session on one worker.

    Raises:
        WorkerLostError, WorkerRefusedError: the worker gave no answer, or has not done it.
    """
    await calls.kv(worker_id, {"op": "release_session", "session_id": session_id}, timeout_s)
