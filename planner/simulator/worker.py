"""A simulated worker: its queue, engine, KV memory and windows, and the views that coordinators have of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, nextafter
from typing import Any

from ampd.serving.kv_eviction import NextRounds
from ampd.serving.prefill_queue import PrefillQueue
from ampd.state.known_worker import SAMPLE_INTERVAL_S, merge
from ampd.telemetry.windows import SlidingWindow
from ampd.types import Parallelism, PrefillTask, Role, Window, WorkerView
from planner.simulator.engine import SimulatedEngine
from planner.simulator.kv_memory import KvMemory, KvStore, Reloads
from planner.simulator.options import EventLoop, ReplicaGroup, World

_NO_WINDOW = Window()


class SimulatedWorker:
    """One replica. It can prefill and decode, and its role decides which new work it gets.

    Attributes:
        memory: of its device, and its store if it has one.
        reloads: what a worker with a store reloads and reads.
        role, label: as in its view; a pools policy may change them.
        times: what it predicts with; None: the times of all, because they are not corrected.
        on_change: called when the queue, the batch or the sessions here have changed; None: nothing is called.
    """

    def __init__(self, worker_id: str, role: Role, group: ReplicaGroup, world: World, host: str = "") -> None:
        options, parallelism = world.options, Parallelism(group.parallelism.tp, host=host)
        self.worker_id = worker_id
        self.role = role
        self.label = ""
        self.parallelism = parallelism
        self.times = world.times_of(parallelism)
        belief = self.times or world.belief
        next_rounds, store = NextRounds(belief, parallelism), None
        if group.kv_store_tokens:
            surplus = next_rounds.surplus
            store = KvStore(group.kv_store_tokens, options.page_size_tokens, surplus, world.prefixes)
        self.memory = KvMemory(group.kv_capacity_tokens, options.page_size_tokens, world.prefixes, store)
        self.reloads: Reloads | None = None
        if store is not None:
            self.reloads = Reloads(self.memory, world.model, belief, parallelism, next_rounds, world.slo)
        self.ttft = SlidingWindow(options.window_s)
        self.on_change: Callable[[], None] | None = None
        self.engine = SimulatedEngine(
            worker_id, parallelism, self.memory, world, self.times, self.reloads, lambda: self.role
        )
        self.queue = PrefillQueue(
            world.policies.ordering,
            belief,
            parallelism,
            world.loop,
            random.Random(f"{options.seed}/{worker_id}"),
            on_change=self.changed,
        )
        self._view: tuple[WorkerView, float] | None = None  # with the time at which it changes by itself

    @property
    def max_context_tokens(self) -> int:
        """Longest context that it takes, prompt and output together; 0: any."""
        return self.memory.capacity_tokens

    def prefers_read(self, session_id: str, prompt_tokens: int, peer_tokens: int, peer: Parallelism) -> bool:
        """Whether it reads KV from a peer rather than to compute it. A worker without a store always reads."""
        return self.reloads is None or self.reloads.prefers_read(session_id, prompt_tokens, peer_tokens, peer)

    def changed(self) -> None:
        """The cached view is no longer true."""
        self._view = None
        if self.on_change is not None:
            self.on_change()

    def turn(self, role: Role, label: str) -> None:
        """Take another role or label for new work; what is here goes on."""
        self.role, self.label = role, label
        self.changed()

    def view(self, now_s: float) -> WorkerView:
        """This worker as it is now. A view is kept until it changes or a sample leaves a window."""
        kept = self._view
        if kept is None or now_s >= kept[1]:
            self._view = kept = self._made(now_s)
        return kept[0]

    def _made(self, now_s: float) -> tuple[WorkerView, float]:
        """The view, made anew, and until when it holds."""
        store = self.memory.store
        ttft = self.ttft.read(now_s)
        itl = _NO_WINDOW
        until_s = self.ttft.changes_at_s()
        batch, context_tokens = self.engine.batch.load(now_s)
        if batch or self.role.owns_sessions:
            itl = self.engine.batch.itl(now_s)
            until_s = nextafter(now_s, inf)  # decoding changes it all the time
        view = WorkerView(
            self.worker_id,
            self.role,
            self.parallelism if self.times is None else self.times.parallelism,
            self.queue.tasks(),
            ttft,
            itl,
            batch,
            context_tokens,
            # On a device in front of a store, idle sessions are only a cache, and do not count as used.
            self.memory.session_tokens if store is None else self.memory.running_tokens,
            self.memory.capacity_tokens,
            self.max_context_tokens,
            self.memory.resident.held,
            self.label,
            store_used_tokens=0 if store is None else store.session_tokens,
            store_capacity_tokens=0 if store is None else store.capacity_tokens,
            shared_prefixes=self.memory.shared_prefixes(),
        )
        return view, until_s


class Views:
    """The workers as coordinators see them: as they are."""

    def __init__(self, workers: Sequence[SimulatedWorker], loop: EventLoop) -> None:
        self._loop = loop
        self._workers = workers

    def workers(self, coordinator: int) -> Sequence[WorkerView]:
        """All workers, in the order of the cluster."""
        return [self.worker(coordinator, worker) for worker in self._workers]

    def prefill(self, coordinator: int) -> Sequence[WorkerView]:
        """The workers that take prefills of sessions that others own."""
        return [self.worker(coordinator, worker) for worker in self._workers if worker.role.takes_prefills]

    def decode(self, coordinator: int) -> Sequence[WorkerView]:
        """The workers that own sessions."""
        return [self.worker(coordinator, worker) for worker in self._workers if worker.role.owns_sessions]

    def worker(self, coordinator: int, worker: SimulatedWorker) -> WorkerView:  # noqa: ARG002
        """One worker."""
        return worker.view(self._loop.now_s)

    def entered(self, coordinator: int, worker: SimulatedWorker, task: PrefillTask) -> None:
        """This coordinator has just sent a prefill there."""


class DelayedViews(Views):
    """A change at a worker is published `delay_s` later. Until then each coordinator adds the prefills it has sent.

    Windows and contexts change by themselves, so they are published at intervals until they are empty. Roles are known
    at once, because a coordinator changes them.
    """

    def __init__(self, workers: Sequence[SimulatedWorker], loop: EventLoop, delay_s: float, coordinators: int) -> None:
        super().__init__(workers, loop)
        self._delay_s = delay_s
        self._published: dict[str, WorkerView] = {}
        self._pending: set[str] = set()
        self._sampling: set[str] = set()
        self._with_sent: list[dict[str, WorkerView]] = [{} for _ in range(coordinators)]
        for worker in workers:
            self._publish(worker)
            worker.on_change = partial(self._changed, worker)

    def worker(self, coordinator: int, worker: SimulatedWorker) -> WorkerView:
        view = self._with_sent[coordinator].get(worker.worker_id) or self._published[worker.worker_id]
        if view.role is not worker.role or view.label != worker.label:
            view = replace(view, role=worker.role, label=worker.label)
        return view

    def entered(self, coordinator: int, worker: SimulatedWorker, task: PrefillTask) -> None:
        self._with_sent[coordinator][worker.worker_id] = merge(self.worker(coordinator, worker), [task], ())

    def _changed(self, worker: SimulatedWorker) -> None:
        if worker.worker_id not in self._pending:
            self._pending.add(worker.worker_id)
            self._loop.at(self._loop.now_s + self._delay_s, self._publish, worker)

    def _publish(self, worker: Any) -> None:
        self._pending.discard(worker.worker_id)
        view = worker.view(self._loop.now_s)
        self._published[worker.worker_id] = replace(view, held_tokens=dict(view.held_tokens))
        for with_sent in self._with_sent:
            with_sent.pop(worker.worker_id, None)
        is_moving = view.ttft.count or view.itl.count or view.decode_batch
        if is_moving and worker.worker_id not in self._sampling:
            self._sampling.add(worker.worker_id)
            self._loop.at(self._loop.now_s + max(self._delay_s, SAMPLE_INTERVAL_S), self._sample, worker)

    def _sample(self, worker: SimulatedWorker) -> None:
        self._sampling.discard(worker.worker_id)
        self._publish(worker)
