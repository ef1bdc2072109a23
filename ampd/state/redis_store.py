"""Shared state in Redis >= 6.2: each operation is one script and one round trip."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ampd.session_key import tenant_key
from ampd.state import codec
from ampd.state.overlay import merge
from ampd.state.redis_connection import RedisConnection, Subscription
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
    Schema,
    ms,
)
from ampd.state.store import (
    Binding,
    FatalRequestError,
    Heard,
    Leadership,
    LoadedRound,
    Overview,
    RoleAssigned,
    RoundTrips,
    RouteOutcome,
    RouteWrite,
    SessionLimits,
    StateEvent,
    StateRefusedError,
    StateUnavailableError,
    TooManySessionsError,
)
from ampd.types import CoordinatorView, PrefillTask, WorkerView

log = logging.getLogger(__name__)

_GRAPH_IS_FULL, _TENANT_IS_FULL, _IS_FATAL = -1, -2, -3
"""Answers of the script `route` for a session beyond a limit, and for a prompt under which workers died."""

_MOST_DIGITS = 18
"""Of a time in milliseconds."""


class RedisStore:
    """One process's handle on a namespace; a `StateStore`.

    Args:
        clock: the clock of the tasks' arrival times.

    Raises:
        UserError: the URL is malformed.
    """

    def __init__(
        self, url: str, namespace: str, *, clock: Callable[[], float] = time.monotonic, timeout_s: float = 2.0
    ) -> None:
        self._schema = Schema(namespace)
        self._clock = clock
        self._connection = RedisConnection(url, timeout_s)

    @property
    def round_trips(self) -> RoundTrips:
        """Counts and times of the commands so far, without subscriptions."""
        return self._connection.round_trips

    async def publish_worker(self, view: WorkerView, lease_s: float) -> RoleAssigned | None:
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
            ],
        )
        try:
            return None if role is None else codec.decode_role(_record(role))
        except codec.CodecError as error:
            log.warning("skipped a role: %s", error)
            return None

    async def remove_worker(self, worker_id: str) -> None:
        schema = self._schema
        await self._connection.script(
            "remove",
            [schema.workers, schema.worker(worker_id), schema.queue(worker_id)],
            [worker_id, schema.events],
        )

    async def finish_tasks(self, worker_id: str, task_ids: Sequence[str]) -> None:
        schema = self._schema
        await self._connection.script(
            "finish",
            [schema.worker(worker_id), schema.queue(worker_id)],
            [schema.events, ms(QUEUE_TTL_S), worker_id, *task_ids],
        )

    async def announce(self, event: StateEvent) -> None:
        await self._connection.command("PUBLISH", self._schema.events, codec.encode_event(event, self._clock()))

    async def route(self, write: RouteWrite, limits: SessionLimits) -> RouteOutcome:
        schema = self._schema
        session, queue = schema.session(write.session_id), schema.queue(write.queue_worker_id)
        tenant = tenant_key(write.tenant)
        answer = await self._connection.script(
            "route",
            [
                session,
                queue,
                schema.live,
                schema.live_of(tenant),
                schema.tenant_of(write.session_id),
                schema.refused(write.prompt_digest),
            ],
            [
                write.worker_id,
                write.epoch,
                ms(limits.ttl_s),
                write.task.task_id,
                codec.encode_task(write.task, self._clock()),
                schema.events,
                write.queue_worker_id,
                ms(QUEUE_TTL_S),
                write.session_id,
                ms(limits.new_ttl_s),
                limits.per_graph,
                limits.per_tenant,
                tenant if write.tenant else "",
                ms(ENDING_TTL_S) if write.ends_session else "",
            ],
        )
        match answer:
            case [int(refused), *_] if refused == _GRAPH_IS_FULL:
                raise TooManySessionsError("graph", limits.per_graph)
            case [int(refused), *_] if refused == _TENANT_IS_FULL:
                raise TooManySessionsError("tenant", limits.per_tenant)
            case [int(refused), int(deaths), *_] if refused == _IS_FATAL:
                raise FatalRequestError(deaths)
        return _outcome(write.session_id, answer)

    async def record_death(self, prompt_digest: str, death: str) -> int:
        deaths = await self._connection.script(
            "death",
            [self._schema.deaths(prompt_digest), self._schema.refused(prompt_digest)],
            [death, ms(DEATHS_TTL_S), FATAL_DEATHS, ms(REFUSED_S)],
        )
        if not isinstance(deaths, int):
            raise _strange("death")
        return deaths

    async def rebind(self, binding: Binding, worker_id: str, session_ttl_s: float) -> RouteOutcome:
        answer = await self._connection.script(
            "repin",
            [self._schema.session(binding.session_id)],
            [binding.worker_id, binding.epoch, worker_id, ms(session_ttl_s)],
        )
        return _outcome(binding.session_id, answer)

    async def binding(self, session_id: str) -> Binding | None:
        record = await self._connection.command("GET", self._schema.session(session_id))
        return _binding(session_id, record)

    async def end_session(self, session_id: str, tenant: str = "") -> Binding | None:
        schema = self._schema
        record = await self._connection.script(
            "end",
            [
                schema.session(session_id),
                schema.live,
                schema.live_of(tenant_key(tenant)),
                schema.tenant_of(session_id),
                schema.ended,
            ],
            [schema.events, session_id, schema.live_of(""), ms(ENDED_S)],
        )
        return _binding(session_id, record)

    async def ended_sessions(self) -> list[str]:
        answer = await self._connection.command("ZRANGE", self._schema.ended, 0, -1)
        if not isinstance(answer, list):
            raise _strange("with ended sessions")
        return [_text(session_id) for session_id in answer]

    async def lead(self, holder: str, lease_s: float) -> Leadership:
        answer = await self._connection.script(
            "lead", [self._schema.leader, self._schema.assigned], [holder, ms(lease_s)]
        )
        match answer:
            case [(0 | 1) as leads, int(assigned_ago_ms)]:
                return Leadership(bool(leads), assigned_ago_ms / 1000 if assigned_ago_ms >= 0 else None)
        raise _strange("lead")

    async def resign(self, holder: str) -> None:
        await self._connection.script("resign", [self._schema.leader], [holder])

    async def assign_role(self, holder: str, role: RoleAssigned, ttl_s: float) -> bool:
        schema = self._schema
        accepted = await self._connection.script(
            "assign",
            [schema.leader, schema.role(role.worker_id), schema.assigned],
            [holder, codec.encode_role(role), ms(ttl_s), schema.roles, ms(ASSIGNED_TTL_S)],
        )
        if accepted not in (0, 1):
            raise _strange("assign")
        return bool(accepted)

    async def publish_coordinator(self, view: CoordinatorView, lease_s: float) -> None:
        schema, coordinator_id = self._schema, view.coordinator_id
        await self._connection.script(
            "publish_coordinator",
            [schema.coordinators, schema.coordinator(coordinator_id)],
            [coordinator_id, ms(lease_s), codec.encode_coordinator(view), ms(INDEX_TTL_S)],
        )

    async def remove_coordinator(self, coordinator_id: str) -> None:
        # Readers ignore its entry in the index, which the next coordinator that publishes removes.
        await self._connection.command("DEL", self._schema.coordinator(coordinator_id))

    async def record_load(self, rounds: Sequence[LoadedRound], keep_s: float) -> None:
        batch = codec.encode_load(rounds, self._clock())
        await self._connection.script("record_load", [self._schema.load], [batch, ms(keep_s)])

    async def recent_load(self) -> list[LoadedRound]:
        answer = await self._connection.script("load", [self._schema.load], [])
        reader, batches = self._listed("load", answer)
        rounds: list[LoadedRound] = []
        for batch in map(_record, batches):
            try:
                rounds += codec.decode_load(batch.partition(b" ")[2], self._clock() - reader.age_s(batch))
            except codec.CodecError as error:
                _warn_once(f"left out recorded load: {error}")
        return rounds

    async def snapshot(self) -> list[WorkerView]:
        return [heard.view for heard in await self._workers()]

    async def overview(self) -> Overview:
        return Overview(await self._workers(), await self._coordinators())

    async def _workers(self) -> list[Heard[WorkerView]]:
        answer = await self._connection.script("snapshot", [self._schema.workers], [self._schema.prefix])
        reader, workers = self._listed("snapshot", answer)
        views = []
        for view, queue in map(_view_and_queue, workers):
            try:
                views.append(Heard(reader.worker(view, queue), reader.age_s(view)))
            except codec.CodecError as error:
                _warn_once(f"left out a worker: {error}")
        return views

    async def _coordinators(self) -> list[Heard[CoordinatorView]]:
        schema = self._schema
        answer = await self._connection.script("coordinators", [schema.coordinators], [schema.prefix])
        reader, records = self._listed("coordinators", answer)
        views = []
        for record in map(_record, records):
            try:
                views.append(Heard(codec.decode_coordinator(record.partition(b" ")[2]), reader.age_s(record)))
            except codec.CodecError as error:
                _warn_once(f"left out a coordinator: {error}")
        return views

    def watch(self) -> RedisWatcher:
        return RedisWatcher(self._connection, self._schema.events, self._clock)

    def watch_roles(self) -> RedisWatcher:
        return RedisWatcher(self._connection, self._schema.roles, self._clock)

    def refused_ago_s(self) -> float:
        return self._connection.refused_ago_s()

    async def ping(self) -> float:
        start_s = time.perf_counter()
        await self._connection.command("PING")
        return time.perf_counter() - start_s

    async def server_mode(self) -> str:
        """`standalone`, `cluster` or `sentinel`; "" if the server does not tell."""
        try:
            answer = await self._connection.command("HELLO")
        except StateRefusedError:
            # A proxy, or a user without the right; what it does answer is tried.
            await self.ping()
            return ""
        words = answer if isinstance(answer, list) else []
        return next((_text(value) for name, value in pairwise(words) if name == b"mode"), "")

    async def close(self) -> None:
        await self._connection.close()

    def _listed(self, script: str, answer: Any) -> tuple[SnapshotReader, list[Any]]:
        """The records of an answer that begins with the server's time."""
        match answer:
            case [bytes(text), *records] if text.isdigit() and len(text) <= _MOST_DIGITS:
                return SnapshotReader(int(text), self._clock()), records
        raise _strange(script)


class RedisWatcher:
    """A subscription to one of a namespace's channels; a `Watcher`."""

    def __init__(self, connection: RedisConnection, channel: str, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._channel = channel
        self._clock = clock
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        if self._subscription is None:
            self._subscription = await self._connection.subscribe(self._channel)

    def silent_s(self) -> float:
        return 0.0 if self._subscription is None else self._subscription.silent_s()

    def __aiter__(self) -> RedisWatcher:
        return self

    async def __anext__(self) -> StateEvent:
        await self.start()
        assert self._subscription is not None
        while True:
            record = await self._subscription.message()
            try:
                return codec.decode_event(record, self._clock())
            except codec.CodecError as error:
                _warn_once(f"skipped an event: {error}")

    async def aclose(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None


class SnapshotReader:
    """Turns the server's records into views, and the server's times into times of the reader's clock."""

    def __init__(self, server_now_ms: int, now_s: float) -> None:
        self._server_now_ms = server_now_ms
        self._now_s = now_s

    def worker(self, view: bytes, queue: list[bytes]) -> WorkerView:
        """A worker's view with the prefills that were entered or finished since (task id, record, task id, ...)."""
        entered: list[tuple[float, PrefillTask]] = []
        done: set[str] = set()
        for task_id, change in zip(queue[::2], queue[1::2], strict=True):
            try:
                written_s, record = self._stamped(change)
                if record:
                    entered.append((written_s, codec.decode_task(record, written_s)))
                else:
                    done.add(task_id.decode())
            except (codec.CodecError, UnicodeDecodeError) as error:
                _warn_once(f"left out a task: {error}")
        entered.sort(key=lambda item: (item[0], item[1].arrival_s))
        written_s, record = self._stamped(view)
        return merge(codec.decode_view(record, written_s), [task for _, task in entered], done)

    def age_s(self, record: bytes) -> float:
        """Seconds since a stamped record was written, by the server's clock.

        Raises:
            CodecError: the stamp is no number.
        """
        try:
            return (self._server_now_ms - int(record.partition(b" ")[0])) / 1000
        except (ValueError, OverflowError):
            raise codec.CodecError("a record without the time of writing") from None

    def _stamped(self, record: bytes) -> tuple[float, bytes]:
        return self._now_s - self.age_s(record), record.partition(b" ")[2]


def _strange(command: str) -> StateUnavailableError:
    return StateUnavailableError(f"the shared state answers {command} as no Redis with these scripts does")


def _record(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise _strange("with a record")
    return value


def _text(value: Any) -> str:
    try:
        return _record(value).decode()
    except UnicodeDecodeError:
        raise _strange("with a text") from None


def _view_and_queue(entry: Any) -> tuple[bytes, list[bytes]]:
    """A worker's record, and the changes of its queue in pairs of task id and record."""
    match entry:
        case [bytes(view), list(queue)] if len(queue) % 2 == 0:
            return view, [_record(part) for part in queue]
    raise _strange("snapshot")


def _outcome(session_id: str, answer: Any) -> RouteOutcome:
    match answer:
        case [(0 | 1) as accepted, int(epoch), bytes(worker_id)] if epoch >= 0:
            return RouteOutcome(bool(accepted), Binding(session_id, _text(worker_id), epoch))
    raise _strange("with a binding")


def _binding(session_id: str, answer: Any) -> Binding | None:
    if answer is None:
        return None
    epoch, _, worker_id = _record(answer).partition(b" ")
    try:
        return Binding(session_id, worker_id.decode(), int(epoch))
    except ValueError:
        _warn_once("left out a binding that cannot be read")
        return None


@functools.lru_cache(maxsize=1024)
def _warn_once(line: str) -> None:
    """Log a line once, because a worker may publish the same nonsense many times per second."""
    log.warning("%s", line)
