"""Where the KV of this worker's last minute came from, and how much its store dropped: for `ampd top`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ampd.serving.kv_tiers import TIERS
from ampd.telemetry.windows import US, WindowCounts, microseconds
from ampd.types import KvWindow

_EVICTED, _RELOADS, _RELOAD_US = "evicted", "reloads", "reload_us"


class KvCounts:
    """Counts of the last minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._counts = WindowCounts(clock=clock)
        self._evicted_tokens = 0

    def add(self, hit_tokens: Mapping[str, int], reload_s: float) -> None:
        """A call of the engine has ended; `hit_tokens`: by tier. `reload_s` 0: nothing was reloaded."""
        counts = dict(hit_tokens)
        if reload_s:
            counts |= {_RELOADS: 1, _RELOAD_US: microseconds(reload_s)}
        self._counts.add(counts)

    def read(self, evicted_tokens: Mapping[str, int]) -> KvWindow:
        """The last minute.

        Args:
            evicted_tokens: that the store dropped since its start, by cause. What was added since the last reading
                counts as dropped now.
        """
        evicted = sum(evicted_tokens.values())
        if evicted != self._evicted_tokens:
            self._counts.add({_EVICTED: evicted - self._evicted_tokens})
            self._evicted_tokens = evicted
        total = self._counts.read()
        return KvWindow(
            **{f"{tier}_tokens": total[tier] for tier in TIERS},
            evicted_tokens=total[_EVICTED],
            reloads=total[_RELOADS],
            reload_s=total[_RELOAD_US] / US,
        )
