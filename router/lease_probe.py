"""Asks workers whose lease is over whether they live, because the shared state may have refused their renewals."""

from __future__ import annotations

import asyncio
import logging

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.state.view import ClusterView
from router.calls import WorkerCalls
from router.round_errors import WorkerLostError, WorkerRefusedError

log = logging.getLogger(__name__)


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
