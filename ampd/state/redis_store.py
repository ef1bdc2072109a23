"""Shared state in Redis >= 6.2: each operation is one script and one round trip."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import Meta, convert
from msgspec.json import encode

from ampd.errors import UserError
from ampd.keys import tenant_key
from ampd.state import codec
from ampd.state.redis_connection import NO_CLUSTER, RedisConnection, Subscription, check_url
from ampd.state.schema import (
    ASSIGNED_TTL_S,
    DEATHS_TTL_S,
    ENDED_S,
    ENDING_TTL_S,
    FATAL_DEATHS,
    INDEX_TTL_S,
    QUEUE_GRACE_MS,
    QUEUE_TTL_S,
    REFUSED_S,
    REQUEST_TTL_S,
    Schema,
    ms,
)
from ampd.state.store import (
    Binding,
    FatalRequestError,
    Heard,
    Leadership,
    Overview,
    ResentRequestError,
    RoleAssigned,
    RouteOutcome,
    RouteWrite,
    SessionLimits,
    StateEvent,
    StateRefusedError,
    StateUnavailableError,
    TooManySessionsError,
)
from ampd.telemetry.metrics import names
from ampd.telemetry.metrics.exposition import Reading
from ampd.types import CoordinatorView, Count, WorkerView

log = logging.getLogger(__name__)

_Truth = Literal[0, 1]
_Small = Annotated[int, Meta(ge=-1, le=1 << 53)]
_Outcome = tuple[_Truth, Count, bytes]


DEFAULT_TIMEOUT_S = 2.0


async def open_store(
    url: str, namespace: str, *, clock: Callable[[], float] = time.monotonic, timeout_s: float = DEFAULT_TIMEOUT_S
) -> StateStore:
    """Open the shared state and check that it answers.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS; `?ssl_ca_certs=FILE` and the like)
            or `unix://[user:password@]/path[?db=N]`, or `redis+sentinel://[user:password@]host:port,.../SERVICE[/db]`
            (`rediss+sentinel://` with TLS).
        namespace: separates the graphs that share a Redis.
        clock: the clock of the tasks' arrival times.
        timeout_s: for connecting and for each operation.

    Raises:
        UserError: the URL is malformed, or leads to a server of a kind that is not supported.
        StateUnavailableError: the store does not answer, or refuses.
    """
    check_url(url)
    store = StateStore(url, namespace, clock=clock, timeout_s=timeout_s)
    try:
        mode = await store.server_mode()
        if mode == "cluster":
            raise UserError(NO_CLUSTER)
        if mode == "sentinel":
            raise UserError(
                "state URL: a Sentinel listens there; name it as redis+sentinel://host:port,.../SERVICE, with the "
                "service that it watches"
            )
    except BaseException:
        await store.close()
        raise
    return store


class StateStore:
    """One process's handle on the shared state of a namespace. Every call may raise `StateUnavailableError`.

    Args:
        clock: the clock of the tasks' arrival times.

    Raises:
        UserError: the URL is malformed.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._schema = Schema(namespace)
        self._clock = clock
        self._connection = RedisConnection(url, timeout_s)
        self.round_trips = self._connection.round_trips

    async def publish_worker(self, view: WorkerView, lease_s: float, done: Sequence[str] = ()) -> RoleAssigned | None:
        """Write a worker's view and renew its lease; it disappears `lease_s` after the last call.

        Args:
            done: prefills that have left its queue since.

        Returns the role that was assigned to the worker last, if the store still has it.
        """
        schema, worker_id = self._schema, view.worker_id
        role = await self._connection.script(
            "publish",
            [schema.workers, schema.worker(worker_id), schema.queue(worker_id), schema.role(worker_id)],
            [
                worker_id,
                ms(lease_s),
                f"{lease_s:g}",
                codec.encode_view(view, self._clock()),
                schema.events,
                QUEUE_GRACE_MS,
                schema.prefix,
                ms(INDEX_TTL_S),
                ms(QUEUE_TTL_S),
                encode(done),
            ],
        )
        try:
            return None if role is None else codec.decode_role(_read(bytes, role))
        except codec.CodecError as error:
            log.warning("skipped a role: %s", error)
            return None

    async def remove_worker(self, worker_id: str) -> None:
        """Remove a worker and everything that it published."""
        schema = self._schema
        await self._connection.script(
            "remove",
            [schema.workers, schema.worker(worker_id), schema.queue(worker_id)],
            [worker_id, schema.events],
        )

    async def finish_tasks(self, worker_id: str, task_ids: Sequence[str]) -> None:
        """Remove prefills from the stored queue of a worker."""
        schema = self._schema
        await self._connection.script(
            "finish",
            [schema.worker(worker_id), schema.queue(worker_id)],
            [schema.events, ms(QUEUE_TTL_S), worker_id, *task_ids],
        )

    async def announce(self, event: StateEvent) -> None:
        """Publish an event without writing, because a store that refuses writes may still pass on events."""
        await self._connection.command("PUBLISH", self._schema.events, codec.encode_event(event, self._clock()))

    async def route(self, write: RouteWrite, limits: SessionLimits) -> RouteOutcome:
        """Write or refresh a binding and enter the task, atomically and in one round trip.

        Raises:
            TooManySessionsError: the session is new, and would be one too many.
            FatalRequestError: two workers or more died under the prompt, the last one a short time ago.
            ResentRequestError: another coordinator had the request before.
        """
        answer = await self._connection.script("route", *self._routed(write, limits))
        match answer:
            case [-1, *_]:
                raise TooManySessionsError("graph", limits.per_graph)
            case [-2, *_]:
                raise TooManySessionsError("tenant", limits.per_tenant)
            case [-3, int(deaths), *_]:
                raise FatalRequestError(deaths)
            case [-4, *_]:
                raise ResentRequestError
        return _outcome(write.session_id, answer)

    async def refresh(self, writes: Sequence[RouteWrite], limits: SessionLimits) -> list[Binding]:
        """Make writes of settled sessions in one round trip; returns the bindings of sessions that have moved.

        One that is refused is left out, unless all are.
        """
        answers = await self._connection.scripts("route", [self._routed(write, limits) for write in writes])
        return [
            _outcome(write.session_id, said).binding
            for write, said in zip(writes, answers, strict=True)
            if not isinstance(said, Exception) and _read(list, said)[:1] == [0]
        ]

    def _routed(self, write: RouteWrite, limits: SessionLimits) -> tuple[list[str], list[Any]]:
        """Keys and arguments of a write."""
        schema, tenant, task = self._schema, tenant_key(write.tenant), write.task
        return (
            [
                schema.session(write.session_id),
                schema.queue(write.queue_worker_id),
                schema.live,
                schema.live_of(tenant),
                schema.tenant_of(write.session_id),
                schema.refused(write.prompt_digest),
                schema.request(write.request_id),
            ],
            [
                write.worker_id,
                write.epoch,
                ms(limits.ttl_s),
                task.task_id if task else "",
                codec.encode_task(task, self._clock()) if task else "",
                schema.events,
                write.queue_worker_id,
                ms(QUEUE_TTL_S),
                write.session_id,
                ms(limits.new_ttl_s),
                limits.per_graph,
                limits.per_tenant,
                tenant if write.tenant else "",
                ms(ENDING_TTL_S) if write.ends_session else "",
                write.asker,
                ms(REQUEST_TTL_S),
            ],
        )

    async def record_death(self, prompt_digest: str, death: str) -> int:
        """A worker died while it ran a prompt. Returns how many deaths the store knows under this prompt.

        Args:
            death: its name; the same one counts once.
        """
        deaths = await self._connection.script(
            "death",
            [self._schema.deaths(prompt_digest), self._schema.refused(prompt_digest)],
            [death, ms(DEATHS_TTL_S), FATAL_DEATHS, ms(REFUSED_S)],
        )
        count: int = _read(int, deaths)
        return count

    async def rebind(self, binding: Binding, worker_id: str, session_ttl_s: float) -> RouteOutcome:
        """Move a session to another decode worker if `binding` still holds or is newer; this raises the epoch by 1."""
        answer = await self._connection.script(
            "repin",
            [self._schema.session(binding.session_id)],
            [binding.worker_id, binding.epoch, worker_id, ms(session_ttl_s)],
        )
        return _outcome(binding.session_id, answer)

    async def binding(self, session_id: str) -> Binding | None:
        """The binding that holds, or None."""
        record = await self._connection.command("GET", self._schema.session(session_id))
        return _binding(session_id, record)

    async def end_session(self, session_id: str, tenant: str = "", *, last: Binding | None = None) -> Binding | None:
        """Delete a binding and return it.

        Args:
            tenant: of the session, as far as the caller knows; the store knows it unless it has lost the session.
            last: that of the session's last round; nothing happens if a later one holds. None: any one ends.
        """
        schema, owner = self._schema, (last.worker_id, last.epoch) if last else ("", 0)
        record = await self._connection.script(
            "end",
            [
                schema.session(session_id),
                schema.live,
                schema.live_of(tenant_key(tenant)),
                schema.tenant_of(session_id),
                schema.ended,
            ],
            [schema.events, session_id, schema.live_of(""), ms(ENDED_S), *owner],
        )
        return _binding(session_id, record)

    async def ended_sessions(self) -> list[str]:
        """The sessions that ended in the last minutes."""
        answer = await self._connection.command("ZRANGE", self._schema.ended, 0, -1)
        return [_text(session_id) for session_id in _read(list[bytes], answer)]

    async def lead(self, holder: str, lease_s: float) -> Leadership:
        """Take or renew the lead for `lease_s` seconds, unless another coordinator has it."""
        answer = await self._connection.script(
            "lead", [self._schema.leader, self._schema.assigned], [holder, ms(lease_s)]
        )
        leads, assigned_ago_ms = _read(tuple[_Truth, _Small], answer)
        return Leadership(bool(leads), assigned_ago_ms / 1000 if assigned_ago_ms >= 0 else None)

    async def resign(self, holder: str) -> None:
        """Give up the lead, so that another coordinator can take it at once."""
        await self._connection.script("resign", [self._schema.leader], [holder])

    async def assign_role(self, holder: str, role: RoleAssigned, ttl_s: float) -> bool:
        """Assign a role that the store keeps for `ttl_s`. Without the lead this does nothing and returns False."""
        schema = self._schema
        accepted = await self._connection.script(
            "assign",
            [schema.leader, schema.role(role.worker_id), schema.assigned],
            [holder, codec.encode_role(role), ms(ttl_s), schema.roles, ms(ASSIGNED_TTL_S)],
        )
        return bool(_read(_Truth, accepted))

    async def publish_coordinator(self, view: CoordinatorView, lease_s: float) -> None:
        """Write a coordinator's view and renew its lease; it disappears `lease_s` after the last call."""
        schema, coordinator_id = self._schema, view.coordinator_id
        await self._connection.script(
            "publish_coordinator",
            [schema.coordinators, schema.coordinator(coordinator_id)],
            [coordinator_id, ms(lease_s), codec.encode_coordinator(view), ms(INDEX_TTL_S)],
        )

    async def remove_coordinator(self, coordinator_id: str) -> None:
        # Readers ignore its entry in the index, which the next coordinator that publishes removes.
        """Remove a coordinator's view."""
        await self._connection.command("DEL", self._schema.coordinator(coordinator_id))

    async def snapshot(self) -> list[WorkerView]:
        """All live workers with their queues and held sessions, at one moment."""
        return [heard.view for heard in await self._workers()]

    async def overview(self) -> Overview:
        """All live workers, and then all live coordinators: two reads, not one moment."""
        return Overview(await self._workers(), await self._coordinators())

    async def _workers(self) -> list[Heard[WorkerView]]:
        answer = await self._connection.script("snapshot", [self._schema.workers], [self._schema.prefix])
        reader, workers = self._listed(answer, tuple[bytes, list[bytes]])
        views = []
        for view, queue in workers:
            try:
                views.append(Heard(reader.worker(view, queue), reader.age_s(view)))
            except codec.CodecError as error:
                codec.warn_once(f"left out a worker: {error}")
        return views

    async def _coordinators(self) -> list[Heard[CoordinatorView]]:
        schema = self._schema
        answer = await self._connection.script("coordinators", [schema.coordinators], [schema.prefix])
        reader, records = self._listed(answer, bytes)
        views = []
        for record in records:
            try:
                views.append(Heard(codec.decode_coordinator(record.partition(b" ")[2]), reader.age_s(record)))
            except codec.CodecError as error:
                codec.warn_once(f"left out a coordinator: {error}")
        return views

    def watch(self) -> Watcher:
        """Events since `start` or the first `__anext__`; raises `StateUnavailableError` when the store is lost."""
        return Watcher(self._connection, self._schema.events, self._clock)

    def watch_roles(self) -> Watcher:
        """Like `watch`, for assigned roles (`RoleAssigned`) only."""
        return Watcher(self._connection, self._schema.roles, self._clock)

    def refused_ago_s(self) -> float:
        """Seconds since the store last refused a command of this process; infinite if it never did."""
        return self._connection.refused_ago_s()

    async def ping(self) -> float:
        """Round-trip time to the store, in seconds."""
        start_s = time.perf_counter()
        await self._connection.command("PING")
        return time.perf_counter() - start_s

    def readings(self, *, is_available: bool) -> Iterator[Reading]:
        """Metrics of this handle: whether the shared state answers, and its round trips by operation."""
        yield Reading(names.STATE_AVAILABLE, is_available)
        trips = self.round_trips
        for operation, calls in list(trips.calls.items()):
            labels = (operation,)
            yield Reading(names.STATE_ROUND_TRIPS, calls, labels)
            yield Reading(names.STATE_ERRORS, trips.failures[operation], labels)
            yield Reading(names.STATE_SECONDS, trips.total_s.get(operation, 0.0), labels)

    async def server_mode(self) -> str:
        """`standalone`, `cluster` or `sentinel`; "" if the server does not tell."""
        try:
            answer = await self._connection.command("HELLO")
        except StateRefusedError:
            # A proxy, or a user without the right; what it does answer is tried.
            await self.ping()
            return ""
        words = answer if isinstance(answer, list) else []
        return next((_text(_read(bytes, value)) for name, value in pairwise(words) if name == b"mode"), "")

    async def close(self) -> None:
        """Release connections."""
        await self._connection.close()

    def _listed(self, answer: Any, kind: Any) -> tuple[codec.SnapshotReader, list[Any]]:
        """The records of an answer that begins with the server's time."""
        now_ms, *records = _read(list[Any], answer) or [None]
        return codec.SnapshotReader(_read(_Small, now_ms), self._clock()), _read(list[kind], records)


class Watcher:
    """A subscription to one of a namespace's channels; a `Watcher`."""

    def __init__(self, connection: RedisConnection, channel: str, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._channel = channel
        self._clock = clock
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribe. The watcher gets every event after this returns, so that a snapshot taken then misses none."""
        if self._subscription is None:
            self._subscription = await self._connection.subscribe(self._channel)

    def silent_s(self) -> float:
        """Seconds since the last sign of life of the store, which is the age of the watcher's knowledge."""
        return 0.0 if self._subscription is None else self._subscription.silent_s()

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> StateEvent:
        await self.start()
        assert self._subscription is not None
        while True:
            record = await self._subscription.message()
            try:
                return codec.decode_event(record, self._clock())
            except codec.CodecError as error:
                codec.warn_once(f"skipped an event: {error}")

    async def aclose(self) -> None:
        """End the subscription."""
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None


def _read(kind: Any, answer: Any) -> Any:
    """An answer whose parts have the types that our scripts give, because something else may answer at a user's URL."""
    try:
        return convert(answer, kind)
    except ValueError as error:
        raise StateUnavailableError(f"unexpected answer of the shared state ({error}); is it Redis?") from None


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _outcome(session_id: str, answer: Any) -> RouteOutcome:
    accepted, epoch, worker_id = _read(_Outcome, answer)
    return RouteOutcome(bool(accepted), Binding(session_id, _text(worker_id), epoch))


def _binding(session_id: str, answer: Any) -> Binding | None:
    if answer is None:
        return None
    epoch, _, worker_id = _read(bytes, answer).partition(b" ")
    try:
        return Binding(session_id, worker_id.decode(), int(epoch))
    except ValueError:
        codec.warn_once("left out a binding that cannot be read")
        return None
