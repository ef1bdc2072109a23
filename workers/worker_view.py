"""A worker's view of itself, as it is published."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ampd.perf.corrections import CorrectedModel
from ampd.policies.estimates import ORDERED_PREFILLS
from ampd.serving.kv_tiers import TIERS
from ampd.telemetry.windows import US, SlidingWindow, WindowCounts, microseconds
from ampd.types import KvWindow, PrefillTask, QueueRest, WorkerView
from workers.engines.base import Engine
from workers.prefill_queue import AsyncPrefillQueue
from workers.role import WorkerRole

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


@dataclass(frozen=True, slots=True)
class WorkerWindows:
    """TTFT and ITL of the rounds that ran here lately, and where their KV came from."""

    ttft: SlidingWindow
    itl: SlidingWindow
    kv: KvCounts


def listed(tasks: tuple[PrefillTask, ...]) -> tuple[tuple[PrefillTask, ...], QueueRest]:
    """The prefills of a queue that a view lists, and the sums of the others."""
    rest = tasks[ORDERED_PREFILLS:]
    sums = QueueRest(len(rest), sum([task.hist_tokens for task in rest]), sum([task.incr_tokens for task in rest]))
    return tasks[:ORDERED_PREFILLS], sums


class WorkerViewReader:
    """Reads the worker's parts; held sessions are not included.

    Args:
        secrets: marks of those that it accepts.
    """

    def __init__(
        self,
        worker_id: str,
        role: WorkerRole,
        engine: Engine,
        times: CorrectedModel,
        queue: AsyncPrefillQueue,
        windows: WorkerWindows,
        clock: Callable[[], float],
        secrets: tuple[str, ...] = (),
    ) -> None:
        self._worker_id = worker_id
        self._role = role
        self._engine = engine
        self._times = times
        self._queue = queue
        self._windows = windows
        self._clock = clock
        self._secrets = secrets

    def __call__(self) -> WorkerView:
        """The worker now."""
        now_s, info, load = self._clock(), self._engine.info, self._engine.load()
        queue, rest = listed(self._queue.tasks())
        return WorkerView(
            worker_id=self._worker_id,
            role=self._role.role,
            parallelism=self._times.parallelism,
            queue=queue,
            queue_rest=rest,
            ttft=self._windows.ttft.read(now_s),
            itl=self._windows.itl.read(now_s),
            decode_batch=load.running_requests,
            decode_context_tokens=load.running_context_tokens,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=info.kv_capacity_tokens,
            store_used_tokens=self._engine.kv.session_tokens,
            store_capacity_tokens=info.store_capacity_tokens,
            kv_window=self._windows.kv.read(self._engine.kv.figures.evicted_tokens),
            max_context_tokens=info.max_context_tokens,
            label=self._role.label,
            fingerprint=info.fingerprint,
            tokenizer=info.tokenizer,
            shared_prefixes=self._engine.kv.shared_prefixes,
            secrets=self._secrets,
            clock_s=time.time() if self._secrets else 0.0,
        )
