"""Faults of the shared state: Redis away, slow, refusing, or another server behind the same address."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from benchmarks.faults.aims import DEATH_AIM_S
from benchmarks.faults.clock import step_clock
from benchmarks.faults.fault import OUTAGE_S, Action, Check, Fault, Scene, nothing
from benchmarks.faults.redis_proxy import Seen
from tests.waiting import until

_GROUP = "Shared state"
_DUMPED_KEYS = [f"dumped:{number}" for number in range(12)]
_STEP_S = 3600
_SILENT_S = 1.0
_DUMPED_BYTES = 2_200_000
"""While it loads, Redis answers after every 2 MiB."""


@asynccontextmanager
async def _admin(scene: Scene) -> AsyncIterator[Any]:
    async with Redis.from_url(scene.graph.redis.tcp_url, socket_timeout=None) as client:  # it may take long to load
        yield client


def _commands(*lines: str) -> Action:
    async def act(scene: Scene) -> None:
        async with _admin(scene) as client:
            for line in lines:
                await client.execute_command(*line.split())

    return act


def _signals(number: signal.Signals) -> Action:
    async def act(scene: Scene) -> None:
        pid = scene.graph.redis.pid
        assert pid is not None
        os.kill(pid, number)

    return act


async def _start_again(scene: Scene) -> None:
    """An empty server at the same address."""
    scene.graph.redis.stop()
    scene.graph.redis.start()


async def _restart_empty(scene: Scene) -> None:
    await _signals(signal.SIGKILL)(scene)
    await _start_again(scene)


def _sees(look: Callable[[Seen], object]) -> Check:
    """Whether the proxy has seen the fault's effect on the graph."""

    async def has_struck(scene: Scene) -> bool:
        return bool(look(scene.graph.proxy.seen))

    return has_struck


def _refused(word: str) -> Check:
    return _sees(lambda seen: seen.refusals[word])


_broken = _sees(lambda seen: seen.broken)
_silent = _sees(lambda seen: seen.longest_wait_s >= _SILENT_S)
_delayed = _sees(lambda seen: seen.delayed)


async def _new_master_is_used(scene: Scene) -> bool:
    return scene.graph.proxy.seen.opened[scene.graph.redis.port] > 0


async def _clock_is_read(scene: Scene) -> bool:
    """Scripts of the graph have asked for the time since the step."""
    async with _admin(scene) as client:
        return await _time_calls(client) > int(scene.kept["time calls"])


async def _time_calls(client: Any) -> int:
    return int((await client.info("commandstats")).get("cmdstat_time", {}).get("calls", 0))


def _seen_from_now_on(strike: Action) -> Action:
    async def act(scene: Scene) -> None:
        scene.graph.proxy.forget()
        await strike(scene)

    return act


def _delays(round_trip_s: float) -> Action:
    async def act(scene: Scene) -> None:
        scene.graph.proxy.delay_s = round_trip_s / 2

    return act


async def _fail_over(scene: Scene) -> None:
    """New connections reach another, empty master; the old one goes on, and becomes a replica after a second."""
    graph = scene.graph
    scene.kept["old"] = old = graph.redis
    graph.redis = graph.new_redis()
    graph.proxy.target_port = graph.redis.port

    async def demote() -> None:
        await asyncio.sleep(1.0)
        async with Redis.from_url(old.tcp_url) as client:
            await client.execute_command("REPLICAOF", "127.0.0.1", "1")

    scene.running.append(asyncio.create_task(demote()))


async def _end_old_master(scene: Scene) -> None:
    try:
        await asyncio.gather(*scene.running)
    finally:
        scene.kept.pop("old").__exit__()


async def _fill(scene: Scene) -> None:
    """Keys for a dump that takes seconds to read."""
    async with _admin(scene) as client:
        for key in _DUMPED_KEYS:
            await client.set(key, os.urandom(_DUMPED_BYTES))


async def _load_slowly(scene: Scene) -> None:
    """The server restarts from a dump."""
    async with _admin(scene) as client:
        await client.execute_command("SAVE")
        keys = await client.dbsize()  # in a soak the names of a minute's requests are among them
    redis = scene.graph.redis
    redis.stop()
    redis.start_loading(key_load_delay_us=int(OUTAGE_S / keys * 1e6))
    redis.forget_dump()


async def _delete_dumped(scene: Scene) -> None:
    async with _admin(scene) as client:

        async def has_loaded() -> bool:
            with suppress(BusyLoadingError, RedisConnectionError):  # it may not listen yet
                return bool(await client.ping())
            return False

        await until(has_loaded, timeout_s=30, poll_s=0.05)
        await client.delete(*_DUMPED_KEYS)


async def _fail_to_save(scene: Scene) -> None:
    """Writing the dump fails, after which Redis refuses writes (MISCONF)."""
    scene.graph.redis.block_dump()  # first, because Redis may save at once
    async with _admin(scene) as client:
        await client.execute_command("CONFIG", "SET", "save", "1 1")
        with suppress(ResponseError):  # Redis saves already, or an earlier failure counts again
            await client.execute_command("SET", _DUMPED_KEYS[0], "x", "EX", "120")
            await client.execute_command("BGSAVE")


async def _save_again(scene: Scene) -> None:
    scene.graph.redis.unblock_dump()
    async with _admin(scene) as client:
        await client.execute_command("CONFIG", "SET", "save", "")


def _steps(seconds: int) -> Action:
    async def act(scene: Scene) -> None:
        async with _admin(scene) as client:
            await step_clock(client, seconds)
            scene.kept["time calls"] = await _time_calls(client)

    return act


def _fault(name: str, what: str, strike: Action, heal: Action, has_struck: Check, **options: Any) -> Fault:
    more = {"holds_s": OUTAGE_S, **options}
    return Fault(f"redis-{name}", _GROUP, what, _seen_from_now_on(strike), heal, has_struck=has_struck, **more)


def _slow(milliseconds: Sequence[float]) -> list[Fault]:
    return [
        _fault(
            f"slow-{each:g}ms",
            f"each answer takes {each:g} ms longer",
            _delays(each / 1000),
            _delays(0.0),
            _delayed,
            lasts=True,
        )
        for each in milliseconds
    ]


REDIS_FAULTS = [
    _fault(
        "killed",
        "SIGKILL of Redis, an empty one after the outage",
        _signals(signal.SIGKILL),
        _start_again,
        _broken,
        aim_s=DEATH_AIM_S,
    ),
    _fault("empty", "SIGKILL of Redis and an empty one at once", _restart_empty, nothing, _broken, aim_s=DEATH_AIM_S),
    _fault("frozen", "SIGSTOP of Redis", _signals(signal.SIGSTOP), _signals(signal.SIGCONT), _silent, lasts=True),
    _fault(
        "holds-writes",
        "reads are answered, writes are not, as in a failover by the server itself",
        _commands("CLIENT PAUSE 3600000 WRITE"),
        _commands("CLIENT UNPAUSE"),
        _silent,
        lasts=True,
    ),
    *_slow((0.2, 50, 200, 1000)),
    _fault(
        "full",
        "writes are refused: OOM",
        _commands("CONFIG SET maxmemory 1"),
        _commands("CONFIG SET maxmemory 0"),
        _refused("OOM"),
    ),
    _fault(
        "read-only",
        "writes are refused: READONLY",
        _commands("REPLICAOF 127.0.0.1 1"),
        _commands("REPLICAOF NO ONE"),
        _refused("READONLY"),
    ),
    _fault(
        "noperm",
        "writes are refused: NOPERM",
        _commands("ACL SETUSER ampd -@write"),
        _commands("ACL SETUSER ampd +@all"),
        _refused("NOPERM"),
    ),
    _fault(
        "loading",
        "all commands are refused: LOADING",
        _load_slowly,
        _delete_dumped,
        _refused("LOADING"),
        prepare=_fill,
        lasts=True,
    ),
    _fault(
        "misconf",
        "writes are refused: MISCONF, the dump cannot be written",
        _fail_to_save,
        _save_again,
        _refused("MISCONF"),
    ),
    _fault(
        "clock-forward",
        "its clock jumps forward by an hour, and back",
        _steps(_STEP_S),
        _steps(-_STEP_S),
        _clock_is_read,
    ),
    _fault(
        "clock-back", "its clock jumps back by an hour, and forward", _steps(-_STEP_S), _steps(_STEP_S), _clock_is_read
    ),
    _fault(
        "failover",
        "another master behind the same address; the old one lives on, after 1 s as a replica",
        _fail_over,
        _end_old_master,
        _new_master_is_used,
    ),
]
