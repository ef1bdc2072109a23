"""The interface to the shared state. The product implements it on Redis, and the tests in memory too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from ampd.errors import RunError
from ampd.recent_load import RecentRound
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Reading
from ampd.types import CoordinatorView, PrefillTask, Role, Seconds, Text, WorkerView

ViewT = TypeVar("ViewT")


class StateUnavailableError(RunError):
    """The store did not answer in time or refused; the message is one line that a user can act on."""


class StateSlowError(StateUnavailableError):
    """This call got no answer in time, but others did. It may have been executed, or still be."""


class StateRefusedError(StateUnavailableError):
    """The store answers but refuses the command: its memory is full, it is a replica, or a right is missing."""


class FatalRequestError(Exception):
    """A round was refused, because workers died lately while they ran its prompt.

    Attributes:
        deaths: how many.
    """

    def __init__(self, deaths: int) -> None:
        super().__init__(f"workers died {deaths} times while they ran this prompt")
        self.deaths = deaths


class TooManySessionsError(Exception):
    """A new session was refused, because the graph or its tenant has as many as are allowed. The message says which."""

    def __init__(self, whose: str, most: int) -> None:
        super().__init__(f"this {whose} has {most} live sessions, which is its limit")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long a session lives without a round, and how many there may be.

    Attributes:
        ttl_s: from a session's second round on.
        first_ttl_s: until its second round, if it is less. Floods of sessions with one round then cost little memory.
        per_graph, per_tenant: most live sessions; 0: any number.
    """

    ttl_s: float
    first_ttl_s: float = inf
    per_graph: int = 0
    per_tenant: int = 0

    @property
    def new_ttl_s(self) -> float:
        """The life of a session that has had one round."""
        return min(self.first_ttl_s, self.ttl_s)


@dataclass(frozen=True, slots=True)
class Binding:
    """A session's decode worker. `epoch` grows with every rebind and fences writers that hold an old binding.

    A coordinator that loses the store rebinds alone. Therefore its binding may be newer than the stored one, and the
    higher epoch wins.
    """

    session_id: str
    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RouteWrite:
    """The single write of a routing decision: it writes or refreshes the binding and enters the task in a queue.

    Attributes:
        worker_id: the decode worker that the decision assumed.
        epoch: the binding's epoch that the decision assumed; 0 if the session was thought to be new.
        task: the prefill to enter in `queue_worker_id`'s queue metadata.
        tenant: of the session, for the count of live sessions.
        ends_session: the session has no further round, so that its binding outlives this write by seconds only.
        prompt_digest: names the prompt among those under which workers died.
    """

    session_id: str
    worker_id: str
    epoch: int
    queue_worker_id: str
    task: PrefillTask
    tenant: str = ""
    ends_session: bool = False
    prompt_digest: str = ""


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """The result of a write to a binding.

    Attributes:
        accepted: the binding was written and the task is entered. Otherwise nothing was written, and the caller decides
            again with `binding`.
        binding: the binding that holds now.
    """

    accepted: bool
    binding: Binding


class Event(Struct, frozen=True, array_like=True, tag=True):
    """Travels as a list of its kind and its fields, of which the scripts in Redis write some."""


class WorkerUpdated(Event, frozen=True):
    """A worker published its whole view, its queue included, with a lease of `lease_s` seconds."""

    view: WorkerView
    lease_s: Seconds | None = None


class WorkerRemoved(Event, frozen=True):
    """A worker left, or its lease expired (`is_expired`)."""

    worker_id: Text
    is_expired: bool = False


class TaskQueued(Event, frozen=True):
    """A coordinator entered a prefill in a worker's queue."""

    worker_id: Text
    task: PrefillTask


class TaskDone(Event, frozen=True):
    """A worker finished or gave up a prefill that was in its queue."""

    worker_id: Text
    task_id: Text


class SessionEnded(Event, frozen=True):
    """A session was ended; its binding is gone."""

    session_id: Text


class RoleAssigned(Event, frozen=True):
    """The leading coordinator assigned a worker another role or label.

    It has its own channel (`watch_roles`), because only that worker needs it: its next view shows the role to all.
    """

    worker_id: Text
    role: Role
    label: Text
    reason: Text


StateEvent = WorkerUpdated | WorkerRemoved | TaskQueued | TaskDone | SessionEnded | RoleAssigned


LoadedRound = tuple[str, RecentRound]
"""(session, a round of it that has ended)."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """Whether a coordinator leads.

    Attributes:
        leads: it may assign roles until its lease ends.
        assigned_ago_s: seconds since any coordinator assigned a role; None if that was more than an hour ago.
    """

    leads: bool
    assigned_ago_s: float | None = None


@dataclass(frozen=True, slots=True)
class Heard(Generic[ViewT]):
    """The view that a worker or a coordinator published `age_s` seconds ago, by the store's clock."""

    view: ViewT
    age_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    """All live workers and coordinators with the ages of their views. Later changes are merged into workers' views."""

    workers: list[Heard[WorkerView]]
    coordinators: list[Heard[CoordinatorView]]


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


class Watcher(Protocol):
    """A subscription to a store's events: an async iterator that starts by itself if `start` was not called."""

    def __aiter__(self) -> AsyncIterator[StateEvent]: ...

    async def __anext__(self) -> StateEvent: ...

    async def start(self) -> None:
        """Subscribe. The watcher gets every event after this returns, so that a snapshot taken then misses none."""
        ...

    def silent_s(self) -> float:
        """Seconds since the last sign of life of the store, which is the age of the watcher's knowledge."""
        ...

    async def aclose(self) -> None:
        """End the subscription."""
        ...


class StateStore(Protocol):
    """Shared state of one namespace. Every call may raise `StateUnavailableError`."""

    # -- workers (written by the worker itself)
    async def publish_worker(self, view: WorkerView, lease_s: float) -> RoleAssigned | None:
        """Write a worker's view and renew its lease; it disappears `lease_s` after the last call.

        Returns the role that was assigned to the worker last, if the store still has it.
        """
        ...

    async def remove_worker(self, worker_id: str) -> None:
        """Remove a worker and everything that it published."""
        ...

    async def finish_tasks(self, worker_id: str, task_ids: Sequence[str]) -> None:
        """Remove prefills from the stored queue of a worker."""
        ...

    async def announce(self, event: StateEvent) -> None:
        """Publish an event without writing, because a store that refuses writes may still pass on events."""
        ...

    # -- sessions (written by coordinators; Lua compare-and-set on Redis)
    async def route(self, write: RouteWrite, limits: SessionLimits) -> RouteOutcome:
        """Write or refresh a binding and enter the task, atomically and in one round trip.

        Raises:
            TooManySessionsError: the session is new, and would be one too many.
            FatalRequestError: two workers or more died under the prompt, the last one a short time ago.
        """
        ...

    async def record_death(self, prompt_digest: str, death: str) -> int:
        """A worker died while it ran a prompt. Returns how many deaths the store knows under this prompt.

        Args:
            death: its name; the same one counts once.
        """
        ...

    async def rebind(self, binding: Binding, worker_id: str, session_ttl_s: float) -> RouteOutcome:
        """Move a session to another decode worker if `binding` still holds or is newer; this raises the epoch by 1."""
        ...

    async def binding(self, session_id: str) -> Binding | None:
        """The binding that holds, or None."""
        ...

    async def end_session(self, session_id: str, tenant: str = "") -> Binding | None:
        """Delete a binding and return it.

        Args:
            tenant: of the session, as far as the caller knows; the store knows it unless it has lost the session.
        """
        ...

    async def ended_sessions(self) -> list[str]:
        """The sessions that ended in the last minutes."""
        ...

    # -- roles (assigned by the coordinator that leads)
    async def lead(self, holder: str, lease_s: float) -> Leadership:
        """Take or renew the lead for `lease_s` seconds, unless another coordinator has it."""
        ...

    async def resign(self, holder: str) -> None:
        """Give up the lead, so that another coordinator can take it at once."""
        ...

    async def assign_role(self, holder: str, role: RoleAssigned, ttl_s: float) -> bool:
        """Assign a role that the store keeps for `ttl_s`. Without the lead this does nothing and returns False."""
        ...

    # -- coordinators (written by the coordinator itself, for `ampd top`)
    async def publish_coordinator(self, view: CoordinatorView, lease_s: float) -> None:
        """Write a coordinator's view and renew its lease; it disappears `lease_s` after the last call."""
        ...

    async def remove_coordinator(self, coordinator_id: str) -> None:
        """Remove a coordinator's view."""
        ...

    # -- readers
    async def record_load(self, rounds: Sequence[LoadedRound], keep_s: float) -> None:
        """Add rounds that ended to the recent load of the graph, which keeps them for `keep_s`."""
        ...

    async def recent_load(self) -> Sequence[LoadedRound]:
        """The rounds that were recorded, in any order, with times on this handle's clock."""
        ...

    async def overview(self) -> Overview:
        """All live workers, and then all live coordinators: two reads, not one moment."""
        ...

    async def snapshot(self) -> list[WorkerView]:
        """All live workers with their queues and held sessions, at one moment."""
        ...

    def watch(self) -> Watcher:
        """Events since `start` or the first `__anext__`; raises `StateUnavailableError` when the store is lost."""
        ...

    def watch_roles(self) -> Watcher:
        """Like `watch`, for assigned roles (`RoleAssigned`) only."""
        ...

    def refused_ago_s(self) -> float:
        """Seconds since the store last refused a command of this process; infinite if it never did."""
        ...

    @property
    def round_trips(self) -> RoundTrips:
        """Counts and times of the calls so far."""
        ...

    async def ping(self) -> float:
        """Round-trip time to the store, in seconds."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


# -- Metrics of a process's handle on the shared state


def state_readings(store: StateStore, *, is_available: bool) -> Iterator[Reading]:
    """Whether the shared state answers, and its round trips by operation."""
    yield Reading(names.STATE_AVAILABLE, is_available)
    trips = store.round_trips
    for operation, calls in list(trips.calls.items()):
        labels = (operation,)
        yield Reading(names.STATE_ROUND_TRIPS, calls, labels)
        yield Reading(names.STATE_ERRORS, trips.failures[operation], labels)
        yield Reading(names.STATE_SECONDS, trips.total_s.get(operation, 0.0), labels)
