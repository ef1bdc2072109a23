"""The figures of a KV store for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Size and use of a store.

    Attributes:
        used_bytes, used_tokens: of all records, also of those that nobody needs and that wait for their eviction.
        evicted_tokens: by cause, since the start. unused: tokens of no session. surplus: the next round can compute
            them again within its target. idle: tokens of sessions between two rounds. damaged: tokens that were not as
            they were written.
    """

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    evicted_tokens: Mapping[str, int]
