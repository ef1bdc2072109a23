"""A simulated worker: its queue, engine, KV memory and windows, and the view that decisions see of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, nextafter

from ampd.serving.kv_eviction import NextRounds
from ampd.serving.pass_sizes import PassSizes
from ampd.serving.prefill_queue import PrefillQueue
from ampd.serving.slices import Slices
from ampd.telemetry.sliding_window import SlidingWindow
from ampd.types import Parallelism, Role, Window, WorkerView
from planner.simulator.batch_waits import BatchWaits
from planner.simulator.cached_memory import CachedKvMemory
from planner.simulator.cluster import ReplicaGroup
from planner.simulator.compute_spans import ComputeSpans
from planner.simulator.engine import SimulatedEngine
from planner.simulator.kv_memory import KvMemory
from planner.simulator.kv_store import KvStore
from planner.simulator.reloads import Reloads
from planner.simulator.session_kv import SessionKv
from planner.simulator.steps import EngineTimes
from planner.simulator.world import World

_NO_WINDOW = Window()


class SimulatedWorker:
    """One replica. It can prefill and decode, and its role decides which new work it gets.

    Attributes:
        memory: of its device.
        resident: where its idle sessions live: its store if it has one, else `memory`.
        reloads: what a worker with a store reloads and reads.
        role, label: as in its view; a pools policy may change them.
        slices: decides how prefills here share the worker with the decode batch.
        batch_waits: the prefills that wait for the decode batch.
        on_change: called when the queue, the batch or the sessions here have changed; None: nothing is called.
    """

    def __init__(self, worker_id: str, role: Role, group: ReplicaGroup, world: World) -> None:
        options, parallelism = world.options, group.parallelism
        self.worker_id = worker_id
        self.role = role
        self.label = ""
        self.parallelism = parallelism
        self.memory = KvMemory(group.kv_capacity_tokens, options.page_size_tokens, world.prefixes)
        self.resident: SessionKv = self.memory
        self.reloads: Reloads | None = None
        if group.kv_store_tokens:
            next_rounds = NextRounds(world.belief, parallelism)
            store = KvStore(group.kv_store_tokens, options.page_size_tokens, next_rounds.surplus, world.prefixes)
            self.memory = cached = CachedKvMemory(
                group.kv_capacity_tokens, options.page_size_tokens, store, world.prefixes
            )
            self.resident = store
            self.reloads = Reloads(cached, world.model, world.belief, parallelism, next_rounds, world.slo)
        self.ttft = SlidingWindow(options.window_s)
        self.on_change: Callable[[], None] | None = None
        slicing = world.policies.slicing
        self.slices = Slices(slicing, world.belief, parallelism, options.page_size_tokens, lambda: self.role)
        sizes = PassSizes(slicing, world.belief, parallelism, options.page_size_tokens)
        self.engine = SimulatedEngine(
            EngineTimes(world.model, parallelism),
            self.memory,
            world.loop,
            options,
            world.gaps,
            None if world.spans is None else ComputeSpans(worker_id, world.spans),
            self.reloads,
            sizes=sizes if slicing.shares_passes else None,
        )
        self.queue = PrefillQueue(
            world.policies.ordering,
            world.belief,
            parallelism,
            world.loop,
            random.Random(f"{options.seed}/{worker_id}"),
            on_change=self.changed,
        )
        self.batch_waits = BatchWaits(world.loop)
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
        store = None if self.reloads is None else self.resident
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
            self.parallelism,
            self.queue.tasks(),
            ttft,
            itl,
            batch,
            context_tokens,
            # On a device in front of a store, idle sessions are only a cache, and do not count as used.
            self.memory.session_tokens if store is None else self.memory.running_tokens,
            self.memory.capacity_tokens,
            self.max_context_tokens,
            self.resident.held,
            self.label,
            store_used_tokens=0 if store is None else store.session_tokens,
            store_capacity_tokens=0 if store is None else store.capacity_tokens,
            shared_prefixes=self.memory.shared_prefixes(),
        )
        return view, until_s
