"""A simulated worker: its queue, engine, KV memory and windows, and the view that decisions see of it."""

from __future__ import annotations

import random
from collections.abc import Callable

from ampd.perf.model import PerformanceModel
from ampd.policies.base import OrderingPolicy
from ampd.serving.prefill_queue import PrefillQueue
from ampd.serving.sliding_window import SlidingWindow
from ampd.types import Role, Window, WorkerView
from planner.simulator.cluster import ReplicaGroup
from planner.simulator.engine import SimulatedEngine
from planner.simulator.events import EventLoop
from planner.simulator.kv_memory import KvMemory
from planner.simulator.options import SimulationOptions
from planner.simulator.outcome import GapRun, Span
from planner.simulator.steps import EngineTimes

_NO_WINDOW = Window()


class SimulatedWorker:
    """One replica. It can do everything, whatever its role says new work is for.

    Attributes:
        role, lane: as in its view; a pools policy may change them.
        has_decoded: whether it is, or once was, a decode worker.
        on_change: called when the queue, the batch or the sessions here have changed.

    Args:
        belief: the times that the ordering counts on; default: `model`, the engine's.
    """

    def __init__(
        self,
        worker_id: str,
        role: Role,
        group: ReplicaGroup,
        model: PerformanceModel,
        ordering: OrderingPolicy,
        loop: EventLoop,
        options: SimulationOptions,
        gaps: list[GapRun],
        spans: list[Span] | None,
        belief: PerformanceModel | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.lane = ""
        self.has_decoded = role is Role.DECODE
        self.parallelism = group.parallelism
        self.memory = KvMemory(group.kv_capacity_tokens, options.page_size_tokens)
        self.ttft = SlidingWindow(options.window_s)
        self.on_change: Callable[[], None] = _nothing
        self.engine = SimulatedEngine(
            worker_id, EngineTimes(model, group.parallelism), self.memory, loop, options, gaps, spans
        )
        self.queue = PrefillQueue(
            ordering,
            belief or model,
            group.parallelism,
            clock=loop.clock,
            call_later=loop.call_later,
            rng=random.Random(f"{options.seed}/{worker_id}"),
            concurrency=options.prefill_concurrency,
            prefetch=options.prefetch,
            on_change=self.changed,
        )
        self._view: WorkerView | None = None
        self._view_until_s = 0.0

    def changed(self) -> None:
        """The cached view is no longer true."""
        self._view = None
        self.on_change()

    def turn(self, role: Role, lane: str) -> None:
        """Take another role or lane for new work; what is here goes on."""
        self.role, self.lane = role, lane
        self.has_decoded |= role is Role.DECODE
        self.changed()

    def view(self, now_s: float) -> WorkerView:
        """This worker as it is now."""
        view = self._view
        if view is None or now_s >= self._view_until_s:
            view = self._view = self._made(now_s)
        return view

    def _made(self, now_s: float) -> WorkerView:
        memory = self.memory
        ttft = self.ttft.read(now_s)
        itl = _NO_WINDOW
        self._view_until_s = self.ttft.changes_at_s()
        batch, context_tokens = self.engine.batch.load(now_s)
        if batch or self.role is Role.DECODE:
            itl = self.engine.batch.itl(now_s)
            self._view_until_s = now_s  # decoding changes it all the time
        return WorkerView(
            self.worker_id,
            self.role,
            self.parallelism,
            self.queue.tasks(),
            ttft,
            itl,
            batch,
            context_tokens,
            memory.used_tokens,
            memory.capacity_tokens,
            memory.capacity_tokens,
            memory.held,
            self.lane,
        )


def _nothing() -> None:
    return
