"""What a process gets from Redis: answers to scripts and commands, and messages of a subscription.

The client is real and so is its connection. At the other end is a server that gives an answer of a wrong form, cuts it
at any byte, or sends anything.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampd.state import codec
from ampd.state.redis_store import StateStore
from ampd.state.store import (
    Binding,
    RoleAssigned,
    RouteWrite,
    SessionEnded,
    SessionLimits,
    StateUnavailableError,
    TooManySessionsError,
)
from ampd.types import CoordinatorView, Parallelism, PrefillTask, Role, Slo, WorkerView
from benchmarks.fuzz.http_answers import pieces
from benchmarks.fuzz.mutations import changed, changed_bytes
from benchmarks.fuzz.target import Target

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 1.0
_NOW_MS = b"1700000000500"
_SLO = Slo(2.0, 0.1)
_TASK = PrefillTask("t1", "0" * 32, 160, 40, 0.0, _SLO)
_VIEW = WorkerView("d1", Role.DECODE, Parallelism(1), (_TASK,), kv_capacity_tokens=100_000)
_WRITE = RouteWrite("0" * 32, "d1", 1, "d1", _TASK)
_LIMITS = SessionLimits(60.0, per_graph=5)
_STAMP = b"1700000000000 "
_SET_UP = (b"HELLO", b"CLIENT", b"SELECT", b"AUTH")
_SMALL = 1 << 62


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation of the store, a valid answer of Redis to it, and a check of what the caller gets."""

    run: Callable[[StateStore], Awaitable[Any]]
    answer: Any
    is_sound: Callable[[Any], bool]


def _is_binding(value: Any) -> bool:
    return value is None or (type(value.epoch) is int and type(value.worker_id) is str)


def _is_outcome(value: Any) -> bool:
    return type(value.accepted) is bool and value.binding is not None and _is_binding(value.binding)


def _is_overview(value: Any) -> bool:
    return all(math.isfinite(heard.heard_ago_s) for heard in (*value.workers, *value.coordinators))


_ROLE = RoleAssigned("d1", Role.PREFILL, "short", "ttft-short")
_BINDING = Binding("0" * 32, "d1", 3)
_STORED_VIEW = _STAMP + codec.encode_view(_VIEW, 0.0)
_WORKERS = [_NOW_MS, [_STORED_VIEW, [b"t2", _STAMP + codec.encode_task(_TASK, 0.0), b"t1", _STAMP]]]
_CALLS: dict[str, _Call] = {
    "publish": _Call(
        lambda store: store.publish_worker(_VIEW, 5.0), codec.encode_role(_ROLE),
        lambda value: value is None or isinstance(value.role, Role),
    ),
    "route": _Call(lambda store: store.route(_WRITE, _LIMITS), [1, 2, b"d1"], _is_outcome),
    "repin": _Call(lambda store: store.rebind(_BINDING, "d2", 60.0), [1, 4, b"d2"], _is_outcome),
    "binding": _Call(lambda store: store.binding("0" * 32), b"3 d1", _is_binding),
    "end": _Call(lambda store: store.end_session("0" * 32), b"3 d1", _is_binding),
    "lead": _Call(
        lambda store: store.lead("c1", 5.0), [1, 2500],
        lambda value: value.assigned_ago_s is None or 0 <= value.assigned_ago_s < math.inf,
    ),
    "assign": _Call(lambda store: store.assign_role("c1", _ROLE, 5.0), 1, lambda value: type(value) is bool),
    "snapshot": _Call(
        lambda store: store.snapshot(), _WORKERS, lambda views: all(isinstance(view, WorkerView) for view in views)
    ),
    "coordinators": _Call(
        lambda store: store._coordinators(),
        [_NOW_MS, _STAMP + codec.encode_coordinator(CoordinatorView("c1", _SLO))],
        lambda found: all(math.isfinite(heard.age_s) for heard in found),
    ),
    "ping": _Call(lambda store: store.ping(), b"PONG", lambda seconds: seconds >= 0),
    "mode": _Call(
        lambda store: store.server_mode(), [b"server", b"redis", b"mode", b"standalone"],
        lambda mode: isinstance(mode, str),
    ),
}  # fmt: skip
_MESSAGE = [b"message", b"channel", codec.encode_event(SessionEnded("0" * 32), 0.0)]


class FuzzedRedis:
    """A server that answers what a test says, a store that asks it, and the event loop of both."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._parts: list[bytes] = []
        self._serving: set[asyncio.Task[Any]] = set()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, _LOOPBACK, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._store = StateStore(f"redis://{_LOOPBACK}:{port}/0", "n", timeout_s=_TIMEOUT_S)

    def close(self) -> None:
        """Stop both."""
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        await self._store.close()
        self._server.close()
        await self._server.wait_closed()

    def targets(self) -> Iterator[Target]:
        """The answers, and the messages."""
        yield Target("answer of Redis", _answer, self._ask, (StateUnavailableError, TooManySessionsError))
        yield Target("message of Redis", _message, self._listen, (StateUnavailableError,))

    def _ask(self, given: tuple[str, list[bytes]]) -> None:
        self._loop.run_until_complete(self._ask_twice(*given))

    async def _ask_twice(self, name: str, parts: list[bytes]) -> None:
        """The caller gets what its type says, or the error; the next call gets its own answer."""
        call = _CALLS[name]
        self._parts = parts
        try:
            assert call.is_sound(await call.run(self._store))
        finally:
            await self._store.close()
            self._parts = [_encoded(_CALLS["binding"].answer)]
            if await self._store.binding(_BINDING.session_id) != _BINDING:
                raise AssertionError("the next answer is not understood")
            await self._store.close()

    def _listen(self, parts: list[bytes]) -> None:
        self._loop.run_until_complete(self._hear(parts))

    async def _hear(self, parts: list[bytes]) -> None:
        """Events until the connection is lost."""
        self._parts = [_encoded([b"subscribe", b"channel", 1]), *parts]
        watcher = self._store.watch()
        try:
            async for event in watcher:
                assert event.__class__.__module__ == SessionEnded.__module__
        finally:
            await watcher.aclose()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while (command := await _command(reader)) and command[0].upper() in _SET_UP and len(command) > 1:
                writer.write(b"+OK\r\n")
            if command:
                for part in self._parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _command(reader: StreamReader) -> list[bytes]:
    """One command of the client."""
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


def _encoded(value: Any) -> bytes:
    """A value as Redis sends it. It has no floats and no maps."""
    match value:
        case None:
            return b"$-1\r\n"
        case bool() | int() if abs(value) < _SMALL:
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
        case list():
            return b"*%d\r\n%s" % (len(value), b"".join(map(_encoded, value)))
        case dict():
            return _encoded([part for item in value.items() for part in item])
    text = value if isinstance(value, str) else json.dumps(value)
    return _encoded(text.encode("utf-8", "surrogatepass"))


def _answer(rng: random.Random) -> tuple[str, list[bytes]]:
    name = rng.choice(tuple(_CALLS))
    return name, _sent(rng, _CALLS[name].answer)


def _sent(rng: random.Random, answer: Any) -> list[bytes]:
    kind = rng.random()
    data = _encoded(changed(rng, answer)) if kind < 0.6 else _encoded(answer)
    if 0.6 <= kind < 0.85:
        data = changed_bytes(rng, data)
    if kind >= 0.9:
        data = data[: rng.randint(0, len(data))]
    return pieces(rng, data)


def _message(rng: random.Random) -> list[bytes]:
    wrong = rng.randrange(3)
    parts = [_sent(rng, _MESSAGE) if number == wrong else [_encoded(_MESSAGE)] for number in range(3)]
    return [piece for part in parts for piece in part]
