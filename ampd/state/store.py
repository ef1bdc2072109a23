"""The one interface to shared state, implemented on Redis and in memory (same contract tests on both)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ampd.errors import RunError
from ampd.telemetry.coordinator_view import CoordinatorView
from ampd.types import PrefillTask, Role, WorkerView

ViewT = TypeVar("ViewT")


class StateUnavailableError(RunError):
    """The store did not answer in time, or refused; the message is one line that a user can act on."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A session's decode worker. `epoch` grows with every repin and fences writers that hold an old binding."""

    session_id: str
    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RouteWrite:
    """The one write of a routing decision: claim or refresh the binding and enter the task in a worker's queue.

    Attributes:
        worker_id: the decode worker that the decision assumed.
        epoch: the binding's epoch that the decision assumed; 0 if the session was thought to be new.
        task: the prefill to enter in `queue_worker_id`'s queue metadata.
    """

    session_id: str
    worker_id: str
    epoch: int
    queue_worker_id: str
    task: PrefillTask


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """`accepted`: nothing else was bound and the task is entered. Otherwise nothing was written and `binding` is the
    one that holds: decide again with it."""

    accepted: bool
    binding: Binding


@dataclass(frozen=True, slots=True)
class WorkerUpdated:
    """A worker published its whole view (its queue included), which holds for `lease_s` seconds."""

    view: WorkerView
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """A worker left, or its lease ran out (`is_expired`)."""

    worker_id: str
    is_expired: bool = False


@dataclass(frozen=True, slots=True)
class TaskQueued:
    """A coordinator entered a prefill in a worker's queue."""

    worker_id: str
    task: PrefillTask


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A worker finished (or gave up) a prefill that was in its queue."""

    worker_id: str
    task_id: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session was ended; its binding is gone."""

    session_id: str


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """The leading coordinator gives a worker another role, or another lane of its role's pool.

    It comes on a channel of its own (`watch_roles`): the worker's next view tells everybody else.
    """

    worker_id: str
    role: Role
    lane: str
    reason: str


StateEvent = WorkerUpdated | WorkerRemoved | TaskQueued | TaskDone | SessionEnded | RoleAssigned


@dataclass(frozen=True, slots=True)
class Leadership:
    """Whether a coordinator leads, and what it must know of its predecessors.

    Attributes:
        leads: it may assign roles until its lease ends.
        assigned_ago_s: seconds since the last role was assigned, by whomever; None: not within the last hour.
    """

    leads: bool
    assigned_ago_s: float | None = None


@dataclass(frozen=True, slots=True)
class Heard(Generic[ViewT]):
    """What somebody said of itself, `age_s` seconds ago by the store's own clock."""

    view: ViewT
    age_s: float


@dataclass(frozen=True, slots=True)
class Overview:
    """Everybody alive, with the age of each one's word; small changes since are laid over the workers' views."""

    workers: list[Heard[WorkerView]]
    coordinators: list[Heard[CoordinatorView]]


class Watcher(Protocol):
    """One subscription to a store's events: an async iterator, which starts itself if `start` was not called."""

    def __aiter__(self) -> AsyncIterator[StateEvent]: ...

    async def __anext__(self) -> StateEvent: ...

    async def start(self) -> None:
        """Subscribe. Every event after its return will be seen, so a snapshot taken then loses none."""
        ...

    def silent_s(self) -> float:
        """Seconds since the last sign of life from the store: the staleness of what was seen."""
        ...

    async def aclose(self) -> None:
        """End the subscription."""
        ...


class StateStore(Protocol):
    """Shared state of one namespace. Every call may raise `StateUnavailableError`."""

    # -- workers (written by the worker itself)
    async def publish_worker(self, view: WorkerView, lease_s: float) -> RoleAssigned | None:
        """Write a worker's view and renew its lease; it disappears `lease_s` after the last call.

        Returns the role that was assigned to it last, as long as that is remembered.
        """
        ...

    async def remove_worker(self, worker_id: str) -> None:
        """Drop a worker and all that it published."""
        ...

    async def finish_task(self, worker_id: str, task_id: str) -> None:
        """Take a prefill out of a worker's queue metadata."""
        ...

    # -- sessions (written by coordinators; Lua compare-and-set on Redis)
    async def route(self, write: RouteWrite, session_ttl_s: float) -> RouteOutcome:
        """Claim or refresh a binding and enter the task, atomically; one round trip."""
        ...

    async def repin(self, binding: Binding, worker_id: str, session_ttl_s: float) -> RouteOutcome:
        """Move a session to another decode worker if `binding` still holds; epoch + 1."""
        ...

    async def binding(self, session_id: str) -> Binding | None:
        """The binding that holds, or None."""
        ...

    async def end_session(self, session_id: str) -> Binding | None:
        """Delete a binding and return it."""
        ...

    # -- roles (assigned by the one coordinator that leads)
    async def lead(self, holder: str, lease_s: float) -> Leadership:
        """Lead, or go on leading, for `lease_s` seconds, unless another holder does."""
        ...

    async def resign(self, holder: str) -> None:
        """Stop leading, so that another may at once."""
        ...

    async def assign_role(self, holder: str, role: RoleAssigned, ttl_s: float) -> bool:
        """Assign a role, to be remembered for `ttl_s`; False, and nothing happens, if `holder` does not lead."""
        ...

    # -- coordinators (written by the coordinator itself, for those who look on)
    async def publish_coordinator(self, view: CoordinatorView, lease_s: float) -> None:
        """Write a coordinator's view and renew its lease; it disappears `lease_s` after the last call."""
        ...

    async def remove_coordinator(self, coordinator_id: str) -> None:
        """Drop what a coordinator said of itself."""
        ...

    # -- readers
    async def overview(self) -> Overview:
        """All live workers and coordinators; they were read one after the other."""
        ...

    async def snapshot(self) -> list[WorkerView]:
        """All live workers with their queues and held sessions."""
        ...

    def watch(self) -> Watcher:
        """Events from `start` (or the first `__anext__`) on; ends in `StateUnavailableError` when the store is lost."""
        ...

    def watch_roles(self) -> Watcher:
        """As `watch`, of the assigned roles (`RoleAssigned`) alone."""
        ...

    async def ping(self) -> float:
        """Round-trip time to the store, in seconds."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
