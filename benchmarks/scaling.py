"""The cost of the shared state by the size of a graph, with synthetic workers and sessions and a real Redis.

    python -m benchmarks.scaling [--json] [--workers 8 64 1000] [--sessions 1000 10000 100000] [--calls 300]

The sessions are bound in Redis and held in equal parts by the workers, which publish their views through the product's
own store. Per size it measures:

- `view kB`: the JSON of one worker's view, which lists the sessions that the worker holds.
- `publish`, `route`: CPU time of Redis and of the caller for one publication, and for one round's write.
- `applied`: CPU time of a coordinator for one publication that it gets: reading the event and changing its local copy.
- `snapshot`: wall time of reading all workers, which a coordinator does when it starts or has lost Redis.
- `Redis MB`: memory of Redis with all bindings and views.

`PING` is the CPU time of Redis and of the caller for a bare PING in the same minute. Publications are measured without
subscribers, then with one: `to one` is what Redis needs for passing a publication on to one coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from ampd.errors import RunError, UserError
from ampd.session_key import session_key
from ampd.state import codec
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import RedisStore
from ampd.state.store import RouteWrite, SessionLimits, WorkerUpdated
from ampd.state.view import ClusterView
from ampd.types import PrefillTask, Role, Slo, Window, WorkerView

NAMESPACE = "benchmark-scaling"
LEASE_S = 3600.0
FIRST = f"{0:016x}"
"""The worker that all sessions are bound to."""

_LIMITS = SessionLimits(3600.0)
_CONTEXT_TOKENS = 20_000
_AT_ONCE = 64
_PATIENCE_S = 60.0


def synthetic_workers(count: int, sessions: Sequence[str]) -> list[WorkerView]:
    """One prefill worker per three decode workers, which hold all the sessions in equal parts."""
    prefill = max(1, count // 4)
    held: list[dict[str, int]] = [{} for _ in range(max(1, count - prefill))]
    for number, name in enumerate(sessions):
        held[number % len(held)][name] = _CONTEXT_TOKENS
    roles = [(Role.PREFILL, {}) for _ in range(prefill)] + [(Role.DECODE, part) for part in held]
    return [
        WorkerView(
            f"{number:016x}",
            role,
            ttft=Window(0.3, 20),
            itl=Window(0.02, 20),
            decode_batch=10,
            decode_context_tokens=10 * _CONTEXT_TOKENS,
            kv_used_tokens=len(part) * _CONTEXT_TOKENS,
            kv_capacity_tokens=4_000_000,
            max_context_tokens=131_072,
            held_tokens=part,
        )
        for number, (role, part) in enumerate(roles)
    ]


class Cost:
    """CPU time of calls in us: of Redis as it counts it, and of this process."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe

    async def of(self, call: Callable[[int], Awaitable[Any]], calls: int) -> dict[str, float]:
        """Mean CPU time per call, of calls that are made one after the other."""
        server_s, own_s = await self._server_s(), time.process_time()
        for number in range(calls):
            await call(number)
        own_s, server_s = time.process_time() - own_s, await self._server_s() - server_s
        return {"redis_us": round(1e6 * server_s / calls, 1), "caller_us": round(1e6 * own_s / calls, 1)}

    async def _server_s(self) -> float:
        cpu = await self._probe.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


async def bind(url: str, sessions: int) -> list[str]:
    """Empty Redis, and bind these sessions to the first worker, whichever worker holds them. Returns their names."""
    store, probe = RedisStore(url, NAMESPACE, timeout_s=_PATIENCE_S), Redis.from_url(url)
    try:
        await probe.flushall()
        names = [session_key("", f"session-{number}") for number in range(sessions)]
        for start in range(0, sessions, _AT_ONCE):
            tasks = [_task(name, number) for number, name in enumerate(names[start : start + _AT_ONCE], start)]
            await asyncio.gather(
                *(store.route(RouteWrite(task.session_id, FIRST, 0, FIRST, task), _LIMITS) for task in tasks)
            )
            await store.finish_tasks(FIRST, [task.task_id for task in tasks])
        return names
    finally:
        await asyncio.gather(store.close(), probe.aclose())


async def measure(url: str, workers: int, sessions: list[str], calls: int) -> dict[str, Any]:
    """The figures of one size, with sessions that are bound. It leaves its workers in Redis."""
    store, probe = RedisStore(url, NAMESPACE, timeout_s=_PATIENCE_S), Redis.from_url(url)
    try:
        cost, views = Cost(probe), synthetic_workers(workers, sessions)
        for view in views:
            await store.publish_worker(view, LEASE_S)
        decode = [view for view in views if view.role is Role.DECODE]

        async def publish(number: int) -> None:
            await store.publish_worker(decode[number % len(decode)], LEASE_S)

        async def route(number: int) -> None:
            task = _task(sessions[number % len(sessions)], number)
            await store.route(RouteWrite(task.session_id, FIRST, 1, FIRST, task), _LIMITS)

        figures: dict[str, Any] = {
            "workers": workers,
            "sessions": len(sessions),
            "view_bytes": len(codec.encode_view(decode[0], 0.0)),
            "ping": await cost.of(lambda _: probe.ping(), calls),
            "route": await cost.of(route, calls),
            "publish": await cost.of(publish, calls),
        }
        watched_us = await _watched(url, cost, publish, calls)
        figures["to_one_us"] = round(max(0.0, watched_us - figures["publish"]["redis_us"]), 1)
        figures["applied_us"] = _applied_us(views, decode, calls)
        figures["snapshot_ms"] = round(1e3 * statistics.median([await _timed_s(store.snapshot) for _ in range(3)]), 1)
        figures["redis_mb"] = round((await probe.info("memory"))["used_memory"] / 1e6, 1)
        return figures
    finally:
        await asyncio.gather(store.close(), probe.aclose())


def _task(session: str, number: int) -> PrefillTask:
    return PrefillTask(f"{number:032x}", session, _CONTEXT_TOKENS, 300, time.monotonic(), Slo(1.0, 0.05))


async def _watched(url: str, cost: Cost, publish: Callable[[int], Awaitable[None]], calls: int) -> float:
    """CPU time of Redis per publication, in us, with one subscriber that reads all events."""
    reader = RedisStore(url, NAMESPACE, timeout_s=_PATIENCE_S)
    watcher = reader.watch()
    await watcher.start()

    async def read() -> None:
        async for _ in watcher:
            pass

    reading = asyncio.create_task(read())
    try:
        return (await cost.of(publish, calls))["redis_us"]
    finally:
        reading.cancel()
        await asyncio.wait({reading})
        await watcher.aclose()
        await reader.close()


class _NoStore:
    """The local copy is not connected here."""

    def refused_ago_s(self) -> float:
        return float("inf")


def _applied_us(views: list[WorkerView], decode: list[WorkerView], calls: int) -> float:
    """CPU time of a coordinator per publication: reading the event, changing the local copy, and reading its lists."""
    copy: Any = ClusterView(_NoStore(), lease_s=LEASE_S)  # type: ignore[arg-type]
    for view in views:
        copy.apply(WorkerUpdated(view, LEASE_S))
    records = [codec.encode_event(WorkerUpdated(view, LEASE_S), 0.0) for view in decode[:calls]]
    start_s = time.process_time()
    for number in range(calls):
        copy.apply(codec.decode_event(records[number % len(records)], 0.0))
        copy.decode()
    return round(1e6 * (time.process_time() - start_s) / calls, 1)


async def _timed_s(call: Callable[[], Awaitable[Any]]) -> float:
    start_s = time.perf_counter()
    await call()
    return time.perf_counter() - start_s


async def _measure_all(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes; each is printed at once, except with --json."""
    results = []
    for count in options.sessions:
        names = await bind(url, count)
        for workers in sorted(options.workers):  # the workers of a smaller size are among those of the next
            results.append(await measure(url, workers, names, options.calls))
            if not options.json:
                print(_row(results[-1]), flush=True)
    return results


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--calls", type=int, default=300, help="measured calls of each kind")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    if not options.json:
        print("CPU time in us, of Redis + of the caller; snapshot: wall time in ms")
        print(" ".join(f"{name:>13}" for name in _COLUMNS))
    try:
        with EmbeddedRedis() as server:
            results = asyncio.run(_measure_all(server.url, options))
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"benchmark": "scaling", "sizes": results}))
    return 0


_COLUMNS = ("workers", "sessions", "view kB", "PING", "route", "publish", "to one", "applied", "snapshot", "Redis MB")


def _row(row: dict[str, Any]) -> str:
    cells = [row["workers"], row["sessions"], f"{row['view_bytes'] / 1e3:.1f}"]
    cells += [f"{row[name]['redis_us']} + {row[name]['caller_us']}" for name in ("ping", "route", "publish")]
    cells += [row["to_one_us"], row["applied_us"], row["snapshot_ms"], row["redis_mb"]]
    return " ".join(f"{cell!s:>13}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
