"""What the shared state holds and tells: bindings, events, roles, views with their ages, and its errors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from msgspec import Struct

from ampd.errors import RunError
from ampd.types import CoordinatorView, PrefillTask, Role, Seconds, Text, WorkerView

ViewT = TypeVar("ViewT")


class StateUnavailableError(RunError):
    """The store did not answer in time or refused; the message is one line that a user can act on."""


class StateSlowError(StateUnavailableError):
    """This call got no answer in time, but others did. It may have been executed, or still be."""


class StateRefusedError(StateUnavailableError):
    """The store answers but refuses the command: its memory is full, it is a replica, or a right is missing."""


class ResentRequestError(Exception):
    """A round was not written, because another coordinator had it before: its frontend has lost that one's worker.

    The next write of the same coordinator is made.
    """


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
        task: the prefill to enter in `queue_worker_id`'s queue; None: that worker has it already, and publishes it.
        tenant: of the session, for the count of live sessions.
        ends_session: the session has no further round, so that its binding outlives this write by seconds only.
        prompt_digest: names the prompt among those under which workers died.
        request_id: of the client's request; asker: the coordinator. Another asker before means that a worker was lost.
    """

    session_id: str
    worker_id: str
    epoch: int
    queue_worker_id: str
    task: PrefillTask | None
    tenant: str = ""
    ends_session: bool = False
    prompt_digest: str = ""
    request_id: str = ""
    asker: str = ""


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
    """A worker published its whole view, its queue included, with a lease of `lease_s` seconds.

    Attributes:
        done: prefills that have left its queue, which its earlier views may list, or nobody's.
    """

    view: WorkerView
    lease_s: Seconds | None = None
    done: tuple[Text, ...] = ()


class WorkerRemoved(Event, frozen=True):
    """A worker left, or its lease expired (`is_expired`)."""

    worker_id: Text
    is_expired: bool = False


class TaskQueued(Event, frozen=True):
    """A coordinator entered a prefill in a worker's queue."""

    worker_id: Text
    task: PrefillTask


class TaskDone(Event, frozen=True):
    """A coordinator took a prefill out of a worker's queue, which it may never have reached."""

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
