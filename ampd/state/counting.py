"""Counts and times of the round trips to the store by operation, for metrics and a benchmark."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundTrips:
    """Round trips since the start, by operation name (`route`, `publish`, `held`, ...).

    Attributes:
        calls: commands that were sent, each one round trip.
        failures: commands that ended in an error.
        total_s: seconds spent in commands.
    """

    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    total_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def trip(self, operation: str) -> Iterator[None]:
        """Count and time the block as one round trip."""
        self.calls[operation] += 1
        start_s = time.perf_counter()
        try:
            yield
        except BaseException:
            self.failures[operation] += 1
            raise
        finally:
            self.total_s[operation] = self.total_s.get(operation, 0.0) + time.perf_counter() - start_s
