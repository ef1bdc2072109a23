"""A worker's metrics that mirror its state, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import queued_s
from ampd.state.readings import state_readings
from ampd.state.store import StateStore
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Reading
from ampd.types import Role, WorkerView
from workers.kv.exchange import KvExchange
from workers.prefill_queue import AsyncPrefillQueue
from workers.publisher import Publisher
from workers.role import WorkerRole
from workers.rounds import Rounds
from workers.sessions import SessionKeeper
from workers.settings import WorkerSettings


class WorkerReader:
    """Reads what a worker's parts know at the moment.

    Args:
        read_view: the worker's view of itself, as it is published.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        read_view: Callable[[], WorkerView],
        kv: KvExchange,
        model: PerformanceModel,
        store: StateStore,
        publisher: Publisher,
        queue: AsyncPrefillQueue,
        sessions: SessionKeeper,
        role: WorkerRole,
        rounds: Rounds,
    ) -> None:
        self._settings = settings
        self._read_view = read_view
        self._kv = kv
        self._model = model
        self._store = store
        self._publisher = publisher
        self._queue = queue
        self._sessions = sessions
        self._role = role
        self._rounds = rounds

    def __call__(self) -> Iterator[Reading]:
        """All readings; on the worker's event loop."""
        view, settings = self._read_view(), self._settings
        info = (settings.engine, str(view.parallelism.tp), settings.ordering, settings.slicing)
        yield Reading(names.WORKER_INFO, 1, info)
        for role in Role:
            yield Reading(names.WORKER_ROLE, view.role is role, (role,))
            yield Reading(names.ROLE_CHANGES, self._role.changes[role], (role,))
        yield Reading(names.WORKER_ROUNDS, self._rounds.running)
        yield Reading(names.DECODE_BATCH, view.decode_batch)
        yield Reading(names.DECODE_CONTEXT, view.decode_context_tokens)
        yield from self._queued(view)
        yield from self._memory(view)
        yield from state_readings(self._store, is_available=self._publisher.available)

    def _queued(self, view: WorkerView) -> Iterator[Reading]:
        yield Reading(names.QUEUE_TASKS, len(view.queue))
        yield Reading(names.POSTPONEMENTS, self._queue.postponements)
        try:
            yield Reading(names.QUEUE_WAIT, queued_s(view, self._model))
        except UserError:
            return  # a parallelism that the performance model lacks

    def _memory(self, view: WorkerView) -> Iterator[Reading]:
        yield Reading(names.KV_PINNED, self._kv.pinned_tokens)
        yield Reading(names.KV_USED, view.kv_used_tokens)
        yield Reading(names.KV_CAPACITY, view.kv_capacity_tokens)
        yield Reading(names.SESSIONS_HELD, self._publisher.held_sessions)
        yield Reading(names.SESSIONS_LOST, self._sessions.evicted, (names.EVICTED,))
        yield Reading(names.SESSIONS_LOST, self._sessions.expired, (names.IDLE,))
