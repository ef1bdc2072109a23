"""Metrics of a process's handle on the shared state."""

from __future__ import annotations

from collections.abc import Iterator

from ampd.state.store import StateStore
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Reading


def state_readings(store: StateStore, *, is_available: bool) -> Iterator[Reading]:
    """Whether the shared state answers, and its round trips by operation."""
    yield Reading(names.STATE_AVAILABLE, is_available)
    trips = store.round_trips
    for operation, calls in list(trips.calls.items()):
        labels = (operation,)
        yield Reading(names.STATE_ROUND_TRIPS, calls, labels)
        yield Reading(names.STATE_ERRORS, trips.failures[operation], labels)
        yield Reading(names.STATE_SECONDS, trips.total_s.get(operation, 0.0), labels)
