"""The metrics of a worker that are read from its parts at each scrape; `worker_recorder` counts the others."""

from __future__ import annotations

from collections.abc import Iterator

from ampd.errors import UserError
from ampd.policies.estimates import queued_s
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Reading
from ampd.types import Role, WorkerView
from ampd.wire import fields_of
from workers.parts import WorkerParts


class WorkerReader:
    """Reads the metrics that mirror the state of a worker's parts."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    def __call__(self) -> Iterator[Reading]:
        """All readings; on the worker's event loop."""
        parts = self._parts
        view, settings = parts.read_view(), parts.settings
        info = (settings.engine, str(view.parallelism.tp), settings.ordering, settings.slicing)
        yield Reading(names.WORKER_INFO, 1, info)
        for role in Role:
            yield Reading(names.WORKER_ROLE, view.role is role, (role,))
            yield Reading(names.ROLE_CHANGES, parts.role.changes[role], (role,))
        yield Reading(names.WORKER_ROUNDS, parts.rounds.running)
        yield Reading(names.DECODE_BATCH, view.decode_batch)
        yield Reading(names.DECODE_CONTEXT, view.decode_context_tokens)
        for kind, factor in fields_of(view.parallelism.factors).items():
            yield Reading(names.TIME_FACTOR, factor, (kind,))
        yield from self._queued(view)
        yield from self._memory(view)
        yield from parts.store.readings(is_available=parts.publisher.available)

    def _queued(self, view: WorkerView) -> Iterator[Reading]:
        yield Reading(names.QUEUE_TASKS, view.queued_prefills)
        yield Reading(names.POSTPONEMENTS, self._parts.queue.postponements)
        for reason in names.DROPS:
            yield Reading(names.PREFILLS_DROPPED, self._parts.queue.dropped[reason], (reason,))
        try:
            yield Reading(names.QUEUE_WAIT, queued_s(view, self._parts.model))
        except UserError:
            return  # a parallelism that the performance model lacks

    def _memory(self, view: WorkerView) -> Iterator[Reading]:
        parts = self._parts
        store = parts.engine.kv.figures
        yield Reading(names.KV_PINNED, view.store_used_tokens)
        yield Reading(names.KV_USED, view.kv_used_tokens)
        yield Reading(names.KV_CAPACITY, view.kv_capacity_tokens)
        yield Reading(names.STORE_USED_BYTES, store.used_bytes)
        yield Reading(names.STORE_CAPACITY_BYTES, store.capacity_bytes)
        yield Reading(names.STORE_USED, store.used_tokens)
        yield Reading(names.STORE_CAPACITY, view.store_capacity_tokens)
        for cause in names.EVICTION_CAUSES:
            yield Reading(names.STORE_EVICTED, store.evicted_tokens.get(cause, 0), (cause,))
        yield Reading(names.SESSIONS_HELD, len(parts.changes.held_tokens))
        yield Reading(names.SESSIONS_LOST, parts.sessions.evicted, (names.EVICTED,))
        yield Reading(names.SESSIONS_LOST, parts.sessions.expired, (names.IDLE,))
