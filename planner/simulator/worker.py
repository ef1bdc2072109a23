"""A simulated worker: its queue, engine, KV memory and windows, and the view that decisions see of it."""

from __future__ import annotations

import random
from collections.abc import Callable

from ampd.serving.prefill_queue import PrefillQueue
from ampd.serving.slices import Slices
from ampd.serving.sliding_window import SlidingWindow
from ampd.types import Role, Window, WorkerView
from planner.simulator.cluster import ReplicaGroup
from planner.simulator.engine import SimulatedEngine
from planner.simulator.events import Once
from planner.simulator.kv_memory import KvMemory
from planner.simulator.steps import EngineTimes
from planner.simulator.world import World

_NO_WINDOW = Window()


class SimulatedWorker:
    """One replica. It can do everything; its role says what new work it gets.

    Attributes:
        role, lane: as in its view; a pools policy may change them.
        has_decoded: whether it is, or once was, a decode worker.
        slices: decides how prefills here share the worker with the decode batch.
        on_change: called when the queue, the batch or the sessions here have changed.
    """

    def __init__(self, worker_id: str, role: Role, group: ReplicaGroup, world: World) -> None:
        options = world.options
        self.worker_id = worker_id
        self.role = role
        self.lane = ""
        self.has_decoded = role is Role.DECODE
        self.parallelism = group.parallelism
        self.memory = KvMemory(group.kv_capacity_tokens, options.page_size_tokens)
        self.ttft = SlidingWindow(options.window_s)
        self.on_change: Callable[[], None] = _nothing
        self.engine = SimulatedEngine(
            worker_id,
            EngineTimes(world.model, group.parallelism),
            self.memory,
            world.loop,
            options,
            world.gaps,
            world.spans,
        )
        self.queue = PrefillQueue(
            world.policies.ordering,
            world.belief,
            group.parallelism,
            world.loop,
            random.Random(f"{options.seed}/{worker_id}"),
            concurrency=options.prefill_concurrency,
            prefetch=options.prefetch,
            on_change=self.changed,
        )
        self.slices = Slices(world.policies.slicing, world.belief, group.parallelism, options.page_size_tokens)
        self._loop = world.loop
        self._held_back: list[Once] = []
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

    def hold(self, wait_s: float, resume: Callable[[], None]) -> None:
        """Leave the worker to its decode batch for `wait_s`, but not longer than until a round ends here."""
        once = Once(resume)
        self._held_back.append(once)
        self._loop.at(self._loop.now_s + wait_s, once)

    def round_ended(self) -> None:
        """A round has left the decode batch."""
        held_back, self._held_back = self._held_back, []
        for once in held_back:
            # Not before the engine has gone on: it does not wait for submissions in answer to its last step.
            self._loop.at(self._loop.now_s, once)

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
