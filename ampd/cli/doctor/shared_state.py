"""Check of the shared state: whether Redis answers, and whether a graph could write to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ampd.cli.doctor.finding import Finding, Verdict
from ampd.cli.serve.settings import EMBEDDED
from ampd.errors import UserError
from ampd.state import open_store
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_connection import RedisConnection, without_secrets
from ampd.state.schema import Schema
from ampd.state.store import StateUnavailableError

_TIMEOUT_S = 20.0
_KEY_TTL_S = 10
_OLDEST = (6, 2)
_KEEPS = "noeviction"


@dataclass(frozen=True, slots=True)
class StateReading:
    """What a Redis answers.

    Attributes:
        place: its address without user, password and options.
        version, policy: empty if its user may not ask for them.
    """

    place: str
    version: str = ""
    policy: str = ""


def read_state(url: str, namespace: str) -> StateReading:
    """Connect as a graph does, write and publish within the graph's rights.

    Raises:
        UserError: it cannot be used.
    """
    if url == EMBEDDED:
        with EmbeddedRedis() as redis:
            return read_state(redis.url, namespace)
    try:
        return asyncio.run(_read(url, namespace))
    except (UserError, StateUnavailableError) as error:
        raise UserError(
            f"{error}; start Redis there, or correct --state-url (docs/state.md has the rights that its user needs)"
        ) from None


async def _read(url: str, namespace: str) -> StateReading:
    store = await open_store(url, namespace, timeout_s=_TIMEOUT_S)
    await store.close()
    connection = RedisConnection(url, _TIMEOUT_S)
    key, text = f"{Schema(namespace).prefix}doctor:{uuid4().hex}", "ampd doctor"
    try:
        await (await connection.subscribe(key)).close()
        await connection.command("PUBLISH", key, text)
        await connection.command("SET", key, text, "EX", _KEY_TTL_S)
        await connection.command("DEL", key)
        hello, memory = await _asked(connection, "HELLO", 2), await _asked(connection, "INFO", "memory")
    finally:
        await connection.close()
    return StateReading(without_secrets(url), _field(hello, "version"), _line(memory, "maxmemory_policy"))


async def _asked(connection: RedisConnection, *command: str | int) -> Any:
    """The answer, or None where the user has no right to ask."""
    try:
        return await connection.command(*command)  # type: ignore[arg-type]
    except StateUnavailableError:
        return None


def _field(answer: Any, name: str) -> str:
    words = [word.decode() if isinstance(word, bytes) else word for word in answer or ()]
    return str(words[words.index(name) + 1]) if name in words else ""


def _line(answer: Any, name: str) -> str:
    lines = answer.decode().splitlines() if isinstance(answer, bytes) else ()
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{name}:")), "")


def judge_state(reading: StateReading) -> Finding:
    """Whether a graph can use this Redis, and whether it keeps what is written."""
    policy = reading.policy or "unknown: its user may not ask"
    found = f"{reading.place}: version {reading.version or 'unknown'}, memory policy {policy}"
    if reading.version and _numbers(reading.version) < _OLDEST:
        return Finding("Redis", Verdict.WRONG, found, "use Redis 6.2 or later")
    if reading.policy not in ("", _KEEPS):
        fix = "CONFIG SET maxmemory-policy noeviction: otherwise a full Redis drops bindings of sessions"
        return Finding("Redis", Verdict.WARNING, found, fix)
    return Finding("Redis", Verdict.OK, found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
