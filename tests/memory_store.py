"""The in-process twin of the Redis store: several handles on one `MemoryState` play several coordinators and workers.

It keeps the same encoded records as Redis does, so that what passes here has passed the codec too. One event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import json

from ampd.state import codec
from ampd.state.known_worker import QUEUE_GRACE_S, merge
from ampd.state.redis_store import StateStore, Watcher
from ampd.state.schema import ASSIGNED_TTL_S, ENDING_TTL_S, FATAL_DEATHS, REFUSED_S
from ampd.state.store import (
    Binding,
    FatalRequestError,
    Heard,
    Leadership,
    Overview,
    ResentRequestError,
    RoleAssigned,
    RoundTrips,
    RouteOutcome,
    RouteWrite,
    SessionEnded,
    SessionLimits,
    StateEvent,
    StateUnavailableError,
    TaskDone,
    TaskQueued,
    TooManySessionsError,
    WorkerRemoved,
)
from ampd.types import CoordinatorView, PrefillTask, WorkerView

Clock = Callable[[], float]
Inbox = asyncio.Queue[bytes | None]

_EVENTS, _ROLES = "events", "roles"


@dataclass(slots=True)
class _Published:
    """A worker's or a coordinator's own word."""

    record: bytes
    at_s: float
    expires_s: float


@dataclass(slots=True)
class _Changes:
    """What was written about a worker since. `queue`: task id -> (when, task record; empty once it is done)."""

    queue: dict[str, tuple[float, bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class _Bound:
    worker_id: str
    epoch: int
    expires_s: float


class MemoryState:
    """What the handles share. `clock` measures leases and TTLs and may be a test's own."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.lost = False
        self._workers: dict[str, _Published] = {}
        self._changes: dict[str, _Changes] = {}
        self._coordinators: dict[str, _Published] = {}
        self._bound: dict[str, _Bound] = {}
        self._tenants: dict[str, str] = {}
        self._deaths: dict[str, set[str]] = {}
        self._askers: dict[str, str] = {}
        self._refused_until_s: dict[str, float] = {}
        self.ended: list[str] = []
        self._leader: tuple[str, float] | None = None
        self._roles: dict[str, tuple[bytes, float]] = {}
        self._assigned_s = float("-inf")
        self._inboxes: list[tuple[str, Inbox]] = []

    def lose(self) -> None:
        """Play a store that is gone: calls fail and watchers end."""
        self.lost = True
        for _, inbox in self._inboxes:
            inbox.put_nowait(None)
        self._inboxes.clear()

    def restore(self, *, empty: bool = False) -> None:
        """Play a store that is back; `empty` if it was restarted, for nothing is persisted."""
        self.lost = False
        if empty:
            self._workers.clear()
            self._changes.clear()
            self._coordinators.clear()
            self._bound.clear()
            self._deaths.clear()
            self._refused_until_s.clear()
            self.ended.clear()
            self._leader = None
            self._roles.clear()
            self._assigned_s = float("-inf")

    def subscribe(self, channel: str) -> Inbox:
        """An inbox that receives every record of a channel from now on, and None when the store is lost."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes.append((channel, inbox))
        return inbox

    def unsubscribe(self, inbox: Inbox) -> None:
        """Drop an inbox."""
        self._inboxes = [(channel, other) for channel, other in self._inboxes if other is not inbox]

    def publish(self, record: bytes, channel: str = _EVENTS) -> None:
        """Put a record into every inbox of a channel."""
        for subscribed, inbox in self._inboxes:
            if subscribed == channel:
                inbox.put_nowait(record)

    def put_worker(self, worker_id: str, record: bytes, lease_s: float, done: Sequence[str] = ()) -> None:
        """A worker's whole view; workers whose lease ran out are removed on the way."""
        now_s = self.clock()
        self._workers[worker_id] = _Published(record, now_s, now_s + lease_s)
        changes = self._of(worker_id)
        for task_id, (at_s, _) in list(changes.queue.items()):
            if now_s - at_s >= QUEUE_GRACE_S:
                del changes.queue[task_id]
        for task_id in done:
            changes.queue[task_id] = (now_s, b"")
        self.publish(b'["WorkerUpdated",%b,%g,%b]' % (record, lease_s, json.encode(done)))
        for other, published in list(self._workers.items()):
            if published.expires_s <= now_s:
                self.drop_worker(other, is_expired=True)

    def drop_worker(self, worker_id: str, *, is_expired: bool = False) -> None:
        """Forget a worker and say so."""
        self._workers.pop(worker_id, None)
        self._changes.pop(worker_id, None)
        self.publish(codec.encode_event(WorkerRemoved(worker_id, is_expired), 0.0))

    def live(self) -> list[tuple[bytes, float, _Changes]]:
        """Record, age and changes of every worker whose lease holds."""
        now_s = self.clock()
        return [
            (published.record, now_s - published.at_s, self._changes.get(worker_id, _Changes()))
            for worker_id, published in self._workers.items()
            if published.expires_s > now_s
        ]

    def is_struck_out(self, worker_id: str, task_id: str) -> bool:
        """Whether a prefill was lately struck out of a worker's queue."""
        return self._of(worker_id).queue.get(task_id, (0.0, b"queued"))[1] == b""

    def put_task(self, worker_id: str, task_id: str, record: bytes) -> None:
        """A prefill entered in a worker's queue, or (empty) struck out of a live worker's; a dead one's simply goes."""
        if record or self._is_live(worker_id):
            self._of(worker_id).queue[task_id] = (self.clock(), record)
        else:
            self._of(worker_id).queue.pop(task_id, None)

    def put_coordinator(self, coordinator_id: str, record: bytes, lease_s: float) -> None:
        """A coordinator's view."""
        now_s = self.clock()
        live = {other: said for other, said in self._coordinators.items() if said.expires_s > now_s}
        self._coordinators = live | {coordinator_id: _Published(record, now_s, now_s + lease_s)}

    def drop_coordinator(self, coordinator_id: str) -> None:
        """Forget a coordinator."""
        self._coordinators.pop(coordinator_id, None)

    def live_coordinators(self) -> list[tuple[bytes, float]]:
        """Record and age in seconds of each one whose lease holds."""
        now_s = self.clock()
        return [(said.record, now_s - said.at_s) for said in self._coordinators.values() if said.expires_s > now_s]

    def bound(self, session_id: str) -> Binding | None:
        """The binding that holds."""
        bound = self._bound.get(session_id)
        if bound is None or bound.expires_s <= self.clock():
            return None
        return Binding(session_id, bound.worker_id, bound.epoch)

    def check_room(self, tenant: str, limits: SessionLimits) -> None:
        """Refuse a new session beyond the limits."""
        live = [session_id for session_id in self._bound if self.bound(session_id)]
        own = [session_id for session_id in live if self._tenants.get(session_id) == tenant]
        if 0 < limits.per_graph <= len(live):
            raise TooManySessionsError("graph", limits.per_graph)
        if 0 < limits.per_tenant <= len(own):
            raise TooManySessionsError("tenant", limits.per_tenant)

    def of_tenant(self, session_id: str, tenant: str) -> None:
        """Note whose session it is."""
        self._tenants[session_id] = tenant

    def bind(self, binding: Binding, ttl_s: float) -> None:
        """Write a binding and renew its TTL."""
        self._bound[binding.session_id] = _Bound(binding.worker_id, binding.epoch, self.clock() + ttl_s)

    def unbind(self, session_id: str) -> None:
        """Delete the binding of a session that has ended."""
        self._bound.pop(session_id, None)
        self.ended.append(session_id)

    def put_death(self, prompt_digest: str, death: str) -> int:
        """The number of deaths under a prompt, with this one."""
        deaths = self._deaths.setdefault(prompt_digest, set())
        deaths.add(death)
        if len(deaths) >= FATAL_DEATHS:
            refused_s = REFUSED_S * 4.0 ** (len(deaths) - FATAL_DEATHS)
            self._refused_until_s[prompt_digest] = self.clock() + refused_s
        return len(deaths)

    def check_asker(self, request_id: str, asker: str) -> None:
        """Raises `ResentRequestError`."""
        before = self._askers.get(request_id)
        if asker:
            self._askers[request_id] = asker
        if asker and before not in (None, asker):
            raise ResentRequestError

    def check_deaths(self, prompt_digest: str) -> None:
        """Refuse a prompt under which workers died lately."""
        if self._refused_until_s.get(prompt_digest, 0.0) > self.clock():
            raise FatalRequestError(len(self._deaths[prompt_digest]))

    def take_lead(self, holder: str, lease_s: float) -> Leadership:
        """Lead, unless another holds a lease."""
        now_s = self.clock()
        if not self._leads(holder) and self._leader is not None and self._leader[1] > now_s:
            return Leadership(leads=False)
        self._leader = (holder, now_s + lease_s)
        ago_s = now_s - self._assigned_s
        return Leadership(leads=True, assigned_ago_s=ago_s if ago_s < ASSIGNED_TTL_S else None)

    def give_up_lead(self, holder: str) -> None:
        """Nobody leads if `holder` did."""
        if self._leads(holder):
            self._leader = None

    def put_role(self, holder: str, worker_id: str, record: bytes, ttl_s: float) -> bool:
        """A role that the leader assigned; False from anybody else."""
        if not self._leads(holder):
            return False
        self._assigned_s = self.clock()
        self._roles[worker_id] = (record, self._assigned_s + ttl_s)
        self.publish(record, _ROLES)
        return True

    def role(self, worker_id: str) -> bytes | None:
        """The role that was assigned to a worker."""
        record, expires_s = self._roles.get(worker_id, (b"", 0.0))
        return record if record and expires_s > self.clock() else None

    def _leads(self, holder: str) -> bool:
        return self._leader is not None and self._leader[0] == holder and self._leader[1] > self.clock()

    def _is_live(self, worker_id: str) -> bool:
        published = self._workers.get(worker_id)
        return published is not None and published.expires_s > self.clock()

    def _of(self, worker_id: str) -> _Changes:
        return self._changes.setdefault(worker_id, _Changes())


class MemoryStore(StateStore):
    """One handle on a shared state. `clock` is the one that the handle's arrival times are on."""

    def __init__(self, state: MemoryState | None = None, clock: Clock = time.monotonic) -> None:
        self.round_trips = RoundTrips()
        self._state = MemoryState() if state is None else state
        self._clock = clock

    async def publish_worker(self, view: WorkerView, lease_s: float, done: Sequence[str] = ()) -> RoleAssigned | None:
        record = codec.encode_view(view, self._clock())
        await self._trip("publish")
        self._state.put_worker(view.worker_id, record, lease_s, done)
        role = self._state.role(view.worker_id)
        return codec.decode_role(role) if role else None

    async def remove_worker(self, worker_id: str) -> None:
        await self._trip("remove")
        self._state.drop_worker(worker_id)

    async def finish_tasks(self, worker_id: str, task_ids: Sequence[str]) -> None:
        await self._trip("finish")
        for task_id in task_ids:
            self._state.put_task(worker_id, task_id, b"")
            self._publish(TaskDone(worker_id, task_id))

    async def announce(self, event: StateEvent) -> None:
        await self._trip("publish")
        self._publish(event)

    def refused_ago_s(self) -> float:
        return float("inf")

    async def route(self, write: RouteWrite, limits: SessionLimits) -> RouteOutcome:
        await self._trip("route")
        return self._put_route(write, limits)

    async def refresh(self, writes: Sequence[RouteWrite], limits: SessionLimits) -> list[Binding]:
        await self._trip("route")
        moved = []
        for write in writes:
            with suppress(TooManySessionsError, FatalRequestError, ResentRequestError):
                outcome = self._put_route(write, limits)
                moved += [] if outcome.accepted else [outcome.binding]
        return moved

    def _put_route(self, write: RouteWrite, limits: SessionLimits) -> RouteOutcome:
        self._state.check_deaths(write.prompt_digest)
        self._state.check_asker(write.request_id, write.asker)
        binding, ttl_s = self._state.bound(write.session_id), limits.ttl_s
        if binding is None:
            if not write.epoch:
                self._state.check_room(write.tenant, limits)
                ttl_s = limits.new_ttl_s
            binding = Binding(write.session_id, write.worker_id, max(write.epoch, 1))
        elif write.epoch > binding.epoch:
            binding = Binding(write.session_id, write.worker_id, write.epoch)
        elif binding.worker_id != write.worker_id or write.epoch not in (0, binding.epoch):
            return RouteOutcome(accepted=False, binding=binding)
        self._state.of_tenant(write.session_id, write.tenant)
        self._state.bind(binding, ENDING_TTL_S if write.ends_session else ttl_s)
        task = write.task
        if task is not None and not self._state.is_struck_out(write.queue_worker_id, task.task_id):
            self._state.put_task(write.queue_worker_id, task.task_id, codec.encode_task(task, self._clock()))
            self._publish(TaskQueued(write.queue_worker_id, task))
        return RouteOutcome(accepted=True, binding=binding)

    async def rebind(self, binding: Binding, worker_id: str, session_ttl_s: float) -> RouteOutcome:
        await self._trip("repin")
        moved = Binding(binding.session_id, worker_id, binding.epoch + 1)
        holding = self._state.bound(binding.session_id)
        if holding not in (None, binding, moved) and holding.epoch >= binding.epoch:
            return RouteOutcome(accepted=False, binding=holding)
        self._state.bind(moved, session_ttl_s)
        return RouteOutcome(accepted=True, binding=moved)

    async def record_death(self, prompt_digest: str, death: str) -> int:
        await self._trip("death")
        return self._state.put_death(prompt_digest, death)

    async def ended_sessions(self) -> list[str]:
        await self._trip("ended")
        return list(self._state.ended)

    async def binding(self, session_id: str) -> Binding | None:
        await self._trip("binding")
        return self._state.bound(session_id)

    async def end_session(
        self,
        session_id: str,
        tenant: str = "",  # noqa: ARG002
        *,
        last: Binding | None = None,
    ) -> Binding | None:
        await self._trip("end")
        binding = self._state.bound(session_id)
        if (
            last
            and binding
            and last.epoch <= binding.epoch
            and (last.worker_id != binding.worker_id or last.epoch not in (0, binding.epoch))
        ):
            return binding
        self._state.unbind(session_id)
        self._publish(SessionEnded(session_id))
        return binding

    async def lead(self, holder: str, lease_s: float) -> Leadership:
        await self._trip("lead")
        return self._state.take_lead(holder, lease_s)

    async def resign(self, holder: str) -> None:
        await self._trip("resign")
        self._state.give_up_lead(holder)

    async def assign_role(self, holder: str, role: RoleAssigned, ttl_s: float) -> bool:
        await self._trip("assign")
        return self._state.put_role(holder, role.worker_id, codec.encode_role(role), ttl_s)

    async def publish_coordinator(self, view: CoordinatorView, lease_s: float) -> None:
        record = codec.encode_coordinator(view)
        await self._trip("publish_coordinator")
        self._state.put_coordinator(view.coordinator_id, record, lease_s)

    async def remove_coordinator(self, coordinator_id: str) -> None:
        await self._trip("del")
        self._state.drop_coordinator(coordinator_id)

    async def snapshot(self) -> list[WorkerView]:
        await self._trip("snapshot")
        return [self._merged(record, age_s, changes) for record, age_s, changes in self._state.live()]

    async def overview(self) -> Overview:
        await self._trip("snapshot")
        workers = [Heard(self._merged(*live), live[1]) for live in self._state.live()]
        await self._trip("coordinators")
        said = self._state.live_coordinators()
        return Overview(workers, [Heard(codec.decode_coordinator(record), age_s) for record, age_s in said])

    def watch(self) -> MemoryWatcher:
        return MemoryWatcher(self._state, self._clock)

    def watch_roles(self) -> MemoryWatcher:
        return MemoryWatcher(self._state, self._clock, _ROLES)

    async def ping(self) -> float:
        start_s = time.perf_counter()
        await self._trip("ping")
        return time.perf_counter() - start_s

    async def close(self) -> None:
        pass

    def _merged(self, record: bytes, age_s: float, changes: _Changes) -> WorkerView:
        now_s, state_now_s = self._clock(), self._state.clock()
        entered: list[PrefillTask] = [
            codec.decode_task(task, now_s - (state_now_s - at_s)) for at_s, task in changes.queue.values() if task
        ]
        done = {task_id for task_id, (_, task) in changes.queue.items() if not task}
        return merge(codec.decode_view(record, now_s - age_s), entered, done)

    def _publish(self, event: StateEvent) -> None:
        self._state.publish(codec.encode_event(event, self._clock()))

    async def _trip(self, operation: str) -> None:
        # the others run here, as they do while Redis is asked; what follows in the caller is atomic, like a script
        with self.round_trips.trip(operation):
            await asyncio.sleep(0)
            if self._state.lost:
                raise StateUnavailableError("shared state memory:// is lost")


class MemoryWatcher(Watcher):
    """A subscription to one channel of a `MemoryState`."""

    def __init__(self, state: MemoryState, clock: Clock, channel: str = _EVENTS) -> None:
        self._state = state
        self._clock = clock
        self._channel = channel
        self._inbox: Inbox | None = None

    async def start(self) -> None:
        if self._state.lost:
            raise StateUnavailableError("shared state memory:// is lost")
        if self._inbox is None:
            self._inbox = self._state.subscribe(self._channel)

    def silent_s(self) -> float:
        return 0.0

    def __aiter__(self) -> MemoryWatcher:
        return self

    async def __anext__(self) -> StateEvent:
        await self.start()
        assert self._inbox is not None
        record = await self._inbox.get()
        if record is None:
            raise StateUnavailableError("shared state memory:// was lost")
        return codec.decode_event(record, self._clock())

    async def aclose(self) -> None:
        if self._inbox is not None:
            self._state.unsubscribe(self._inbox)
            self._inbox = None
