"""The parts of one worker process, wired together in the order of their dependencies."""

from __future__ import annotations

import time
from collections.abc import Callable

from ampd.call_signatures import secret_mark
from ampd.perf.corrections import CorrectedModel
from ampd.policies.base import OrderingPolicy
from ampd.serving.admission import patience_s
from ampd.state.redis_store import StateStore
from ampd.telemetry.logs import RoundLog
from ampd.telemetry.windows import SlidingWindow
from ampd.types import Role, WorkerView
from workers.engines.base import Engine
from workers.pending_changes import PendingChanges
from workers.prefill_queue import AsyncPrefillQueue
from workers.publisher import Publisher
from workers.role import WorkerRole
from workers.round_log import RoundEvents
from workers.round_service import KvReads, RoundService
from workers.session_releaser import SessionReleaser
from workers.settings import WorkerSettings
from workers.worker_recorder import WorkerRecorder
from workers.worker_view import KvCounts, WorkerViewReader, WorkerWindows


class WorkerParts:
    """Everything of a worker but Dynamo.

    Args:
        engine: started.
        keys: the secrets of the graph.
    """

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        engine: Engine,
        store: StateStore,
        model: CorrectedModel,
        ordering: OrderingPolicy,
        clock: Callable[[], float] = time.monotonic,
        keys: tuple[bytes, ...] = (),
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.store = store
        self.model = model
        self.role = WorkerRole(Role(settings.role))
        self.recorder = WorkerRecorder()
        self.changes = PendingChanges()
        self.queue = AsyncPrefillQueue(
            ordering,
            model,
            engine.info.parallelism,
            on_change=self.changes.changed,
            clock=clock,
            patience_s=lambda task: patience_s(task, settings.slo, settings.max_wait),
        )
        self.sessions = SessionReleaser(engine.kv, settings.session_ttl_s, clock, settings.session_first_ttl_s)
        windows = WorkerWindows(SlidingWindow(), SlidingWindow(), KvCounts(clock))
        self.read_view: Callable[[], WorkerView] = WorkerViewReader(
            worker_id, self.role, engine, model, self.queue, windows, clock, tuple(map(secret_mark, keys))
        )
        self.publisher = Publisher(
            store,
            worker_id,
            self.read_view,
            self.changes,
            settings.lease_s,
            on_role=self.role.adopt,
            on_return=self._release_ended,
        )
        log_rounds = RoundLog(settings.log_rounds)
        events = RoundEvents(worker_id, log_rounds, self.recorder, windows, self.changes, clock)
        reads = KvReads(engine, model, settings.kv_timeout_s)
        self.rounds = RoundService(worker_id, engine, self.queue, self.sessions, events, reads, clock)

    async def _release_ended(self) -> None:
        """Release the sessions that ended while this worker could not be called."""
        for session_id in await self.store.ended_sessions():
            if session_id in self.changes.held_tokens and not self.sessions.is_running(session_id):
                await self.sessions.release(session_id)

    def held(self, session_id: str, tokens: int) -> None:
        """The KV exchange holds `tokens` of a session now; 0: none any more."""
        self.changes.held(session_id, tokens, is_running=self.sessions.is_running(session_id))
        if self.role.role.owns_sessions:  # elsewhere it is a copy
            self.sessions.held(session_id, tokens)
