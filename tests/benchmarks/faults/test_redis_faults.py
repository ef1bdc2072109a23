"""Faults of Redis have struck when the graph's commands were refused, delayed or lost, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.faults import redis_faults
from benchmarks.faults.cluster import LiveGraph
from benchmarks.faults.fault import Fault, Scene, nothing
from benchmarks.faults.moments import Moment
from benchmarks.faults.redis_faults import REDIS_FAULTS
from benchmarks.faults.redis_proxy import RedisProxy
from benchmarks.faults.redis_server import FaultyRedis
from tests.waiting import until

_SLOW_TO_STRIKE = ("redis-loading", "redis-frozen", "redis-slow-1000ms")
"""These take seconds."""

_ANSWER_S = 3.0
_WRITES = "return redis.call('SET', KEYS[1], 'value')"

TRIED = [
    pytest.param(fault, id=fault.name, marks=[pytest.mark.slow] * (fault.name in _SLOW_TO_STRIKE))
    for fault in REDIS_FAULTS
]
_HAS_NO_SWITCH = {"redis-clock-forward", "redis-clock-back"}
"""What they change is seen with the next command that asks for the time, and never without the fault."""


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(redis_faults, "_SILENT_S", 0.05)
    unused = cast("Any", None)
    with FaultyRedis() as redis:
        async with RedisProxy(redis.port) as proxy:
            graph = LiveGraph(tmp_path, unused, redis, proxy)
            yield Scene(graph, unused, unused, Moment.WAITING)
            graph.redis.__exit__()


async def use(scene: Scene, times: int = 3) -> None:
    """Scripts as a process of the graph sends them: one asks for the time, one writes."""
    for _ in range(times):
        async with Redis.from_url(scene.graph.proxy.url, socket_timeout=_ANSWER_S) as client:
            with suppress(RedisError, OSError):
                await client.eval(_WRITES, 1, "key")
            with suppress(RedisError, OSError):
                await client.eval("return redis.call('TIME')", 0)
        await asyncio.sleep(0)


@pytest.mark.parametrize("fault", TRIED)
async def test_a_fault_of_redis_has_struck_when_a_command_of_the_graph_met_it(scene: Scene, fault: Fault) -> None:
    await fault.prepare(scene)
    async with Redis.from_url(scene.graph.proxy.url) as client:
        await client.ping()
        await fault.strike(scene)

        async def is_struck() -> bool:
            await use(scene, times=1)
            return await fault.has_struck(scene)

        try:
            await until(is_struck)
        finally:
            await fault.heal(scene)


@pytest.mark.parametrize("fault", TRIED)
async def test_a_fault_of_redis_that_does_nothing_never_strikes(scene: Scene, fault: Fault) -> None:
    if fault.name in _HAS_NO_SWITCH:
        scene.kept["time calls"] = 10**6
    without = replace(fault, strike=redis_faults._seen_from_now_on(nothing), heal=nothing)
    await use(scene)
    await without.strike(scene)
    if fault.name == "redis-failover":
        scene.graph.redis.port += 1  # the new master, to which nothing leads
    await use(scene)
    assert not await without.has_struck(scene)
