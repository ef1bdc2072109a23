"""Check of the shared state: whether Redis answers, how fast, and whether a graph could write to it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
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
_CALLS = 200
_KEY_TTL_S = 10
_SLOW_P99_S = 0.01
"""A round waits for one write. More than this is a visible part of a TTFT."""
_OLDEST = (6, 2)
_KEEPS = "noeviction"


@dataclass(frozen=True, slots=True)
class StateReading:
    """What a Redis answers.

    Attributes:
        place: its address without user, password and options.
        problem: why it cannot be used; empty: it can.
        version, policy: empty if its user may not ask for them.
        p50_s, p99_s: of a round trip with one write.
    """

    place: str
    problem: str = ""
    version: str = ""
    policy: str = ""
    p50_s: float = 0.0
    p99_s: float = 0.0


def read_state(url: str, namespace: str) -> StateReading:
    """Connect as a graph does, write and publish within the graph's rights, and time round trips."""
    if url != EMBEDDED:
        return asyncio.run(_read(url, namespace))
    try:
        with EmbeddedRedis() as redis:
            return asyncio.run(_read(redis.url, namespace))
    except UserError as error:
        return StateReading("embedded Redis", problem=str(error))


async def _read(url: str, namespace: str) -> StateReading:
    place = without_secrets(url)
    try:
        store = await open_store(url, namespace, timeout_s=_TIMEOUT_S)
        await store.close()
        connection = RedisConnection(url, _TIMEOUT_S)
        try:
            return await _measured(connection, Schema(namespace), place)
        finally:
            await connection.close()
    except (UserError, StateUnavailableError) as error:
        return StateReading(place, problem=str(error))


async def _measured(connection: RedisConnection, schema: Schema, place: str) -> StateReading:
    key, text = schema.prefix + b"doctor:" + uuid4().hex.encode(), b"ampd doctor"
    subscription = await connection.subscribe(key)
    try:
        await connection.command("PUBLISH", key, text)
        async with asyncio.timeout(_TIMEOUT_S):
            while await subscription.message() != text:
                pass
    except TimeoutError:
        return StateReading(place, problem="a published message did not arrive")
    finally:
        await subscription.close()
    seconds = []
    for _ in range(_CALLS):
        start_s = time.perf_counter()
        await connection.command("SET", key, text, "EX", _KEY_TTL_S)
        seconds.append(time.perf_counter() - start_s)
    await connection.command("DEL", key)
    return StateReading(
        place,
        version=_field(await _asked(connection, "HELLO", 2), "version"),
        policy=_line(await _asked(connection, "INFO", "memory"), "maxmemory_policy"),
        p50_s=_percentile(seconds, 0.5),
        p99_s=_percentile(seconds, 0.99),
    )


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


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def judge_state(reading: StateReading) -> list[Finding]:
    """Whether a graph can use this Redis, and whether rounds would wait for it."""
    if reading.problem:
        fix = "start Redis there, or correct --state-url; docs/state.md has the rights that its user needs"
        return [Finding("Redis", Verdict.WRONG, f"{reading.place}: {reading.problem}", fix)]
    found = (
        f"{reading.place}: version {reading.version or 'unknown'}, writes in {reading.p50_s * 1000:.2f} ms (P50), "
        f"{reading.p99_s * 1000:.2f} ms (P99), memory policy {reading.policy or 'unknown: its user may not ask'}"
    )
    if reading.version and _numbers(reading.version) < _OLDEST:
        return [Finding("Redis", Verdict.WRONG, found, "use Redis 6.2 or later")]
    if reading.policy not in ("", _KEEPS):
        fix = "CONFIG SET maxmemory-policy noeviction: otherwise a full Redis drops bindings of sessions"
        return [Finding("Redis", Verdict.SLOW, found, fix)]
    if reading.p99_s > _SLOW_P99_S:
        return [Finding("Redis", Verdict.SLOW, found, "move it nearer, or to a machine with a free core")]
    return [Finding("Redis", Verdict.OK, found)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
