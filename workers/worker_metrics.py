"""A worker's metrics: counted as rounds pass through it, and read from its parts at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ampd.errors import UserError
from ampd.policies.estimates import queued_s
from ampd.state.readings import state_readings
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Reading
from ampd.telemetry.metrics.values import Counter, Histogram
from ampd.types import Role, WorkerView
from workers.kv.exchange import KvFetch

if TYPE_CHECKING:
    from workers.parts import WorkerParts


class WorkerRecorder:
    """Counts the rounds of a worker."""

    def __init__(self) -> None:
        self._wait, self._prefill = Histogram(names.PREFILL_WAIT), Histogram(names.PREFILL)
        self._slices = Counter(names.SLICES)
        self._read_s, self._read_bytes = Histogram(names.KV_READ_SECONDS), Counter(names.KV_READ_BYTES)
        self._read_tokens, self._failures = Counter(names.KV_READ_TOKENS), Counter(names.KV_READ_FAILURES)
        self._hits, self._reload_s = Counter(names.KV_HITS), Histogram(names.KV_RELOAD_SECONDS)
        self._gap = Histogram(names.TOKEN_GAP)

    @property
    def recorded(self) -> list[Counter | Histogram]:
        """All counters and histograms of this recorder."""
        reads: list[Counter | Histogram] = [self._read_s, self._read_bytes, self._read_tokens, self._failures]
        return [self._wait, self._prefill, self._slices, *reads, self._hits, self._reload_s, self._gap]

    def read(self, part: str, fetch: KvFetch) -> None:
        """A read of KV from another worker has ended. It is not counted if there was nothing to read."""
        if not fetch.tokens and fetch.error is None:
            return
        self._read_s.observe(fetch.seconds, part)
        self._read_bytes.add(fetch.bytes, part)
        self._read_tokens.add(fetch.tokens, part)
        self._failures.add(fetch.error is not None, part)

    def found(self, hit_tokens: Mapping[str, int], reload_s: float) -> None:
        """A round has ended here; `hit_tokens`: by tier. `reload_s` 0: nothing was reloaded, or it is not measured."""
        for tier, tokens in hit_tokens.items():
            self._hits.add(tokens, tier)
        if reload_s:
            self._reload_s.observe(reload_s)

    def prefilled(self, waited_s: float, prefill_s: float, slices: int) -> None:
        """A prefill has ended with its first token."""
        self._wait.observe(waited_s)
        self._prefill.observe(prefill_s)
        self._slices.add(slices)

    def gap(self, seconds: float, tokens: int) -> None:
        """A round that decodes here got `tokens` more tokens, one per `seconds`."""
        self._gap.observe(seconds, count=tokens)


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
        yield from self._queued(view)
        yield from self._memory(view)
        yield from state_readings(parts.store, is_available=parts.publisher.available)

    def _queued(self, view: WorkerView) -> Iterator[Reading]:
        yield Reading(names.QUEUE_TASKS, len(view.queue))
        yield Reading(names.POSTPONEMENTS, self._parts.queue.postponements)
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
