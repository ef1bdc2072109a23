"""The cost of the shared state by the size of a graph, with synthetic workers and sessions and a real Redis.

    python -m benchmarks.scaling [--json] [--workers 8 64 1000 --sessions 1000 10000] [--calls 300]

The sessions are bound in Redis and held in equal parts by the decode workers, which publish their views through the
product's own store. A quarter of the workers are prefill workers, which hold no sessions and are not measured. Per size
it measures, as CPU time where nothing else is said:

- `view`: the JSON of one decode worker's view, which lists the sessions that the worker holds.
- `PING`: of Redis, for a bare PING in the same minute.
- `route`: of Redis, for one round's write.
- `publish`: of Redis and of the worker, for one publication of a decode worker, without subscribers.
- `+ per coordinator`: of Redis, for passing the publication on to one subscriber.
- `applied`: of a coordinator, for one publication that it gets. Its local copy follows Redis and has a performance
  model, as in a coordinator. After each publication it lists its live workers, as a decision does. A thread of its own
  publishes, and is not counted.
- `snapshot`: wall time of reading all workers, which a coordinator does when it starts or has lost Redis.
- `Redis memory`: with all bindings and views.

`python -m benchmarks.calculated_sizes` calculates the needs of whole graphs from the output with `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import product
from typing import Any

from redis.asyncio import Redis

from ampd.errors import RunError, UserError
from ampd.keys import session_key
from ampd.perf.presets import load_performance_model
from ampd.state import codec
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore
from ampd.state.store import RouteWrite, SessionLimits, StateEvent
from ampd.state.view import ClusterView
from ampd.types import PrefillTask, Role, Slo, Window, WorkerView
from benchmarks import markdown_table
from benchmarks.circumstances import circumstances, in_words

NAMESPACE = "benchmark-scaling"
LEASE_S = 3600.0
FIRST = f"{0:016x}"
"""The worker that all sessions are bound to."""

SIZES = (
    *product((8, 64, 1000), (1000, 10_000)),
    (64, 25_000),
    (256, 25_000),
    *product((8, 64, 1000), (100_000,)),
)
"""(workers, sessions) of docs/scaling.md."""

_LIMITS = SessionLimits(3600.0)
_CONTEXT_TOKENS = 20_000
_AT_ONCE = 64
_PATIENCE_S = 60.0
_UNREAD = 4
"""Publications that are on the way to the local copy. Redis closes the connection of a reader that is far behind."""


def prefill_workers(count: int) -> int:
    """How many of so many workers are prefill workers: one per three decode workers."""
    return max(1, count // 4)


def synthetic_workers(count: int, sessions: Sequence[str]) -> list[WorkerView]:
    """Prefill workers, and decode workers that hold all the sessions in equal parts."""
    prefill = prefill_workers(count)
    held: list[dict[str, int]] = [{} for _ in range(max(1, count - prefill))]
    for number, name in enumerate(sessions):
        held[number % len(held)][name] = _CONTEXT_TOKENS
    roles: list[tuple[Role, dict[str, int]]] = [(Role.PREFILL, {}) for _ in range(prefill)] + [
        (Role.DECODE, part) for part in held
    ]
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
    store, probe = StateStore(url, NAMESPACE, timeout_s=_PATIENCE_S), Redis.from_url(url)
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
    store, probe = StateStore(url, NAMESPACE, timeout_s=_PATIENCE_S), Redis.from_url(url)
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
        figures["applied_us"] = await applied_us(url, decode, calls)
        figures["snapshot_ms"] = round(1e3 * statistics.median([await _timed_s(store.snapshot) for _ in range(3)]), 1)
        figures["redis_mb"] = round((await probe.info("memory"))["used_memory"] / 1e6, 1)
        return figures
    finally:
        await asyncio.gather(store.close(), probe.aclose())


def _task(session: str, number: int) -> PrefillTask:
    return PrefillTask(f"{number:032x}", session, _CONTEXT_TOKENS, 300, time.monotonic(), Slo(1.0, 0.05))


async def _watched(url: str, cost: Cost, publish: Callable[[int], Awaitable[None]], calls: int) -> float:
    """CPU time of Redis per publication, in us, with one subscriber that reads all events."""
    reader = StateStore(url, NAMESPACE, timeout_s=_PATIENCE_S)
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


class FollowingCopy(ClusterView):
    """A coordinator's local copy. After each event it lists its workers, as the next decision would."""

    def __init__(self, store: StateStore) -> None:
        super().__init__(store, lease_s=LEASE_S, model=load_performance_model("qwen3-32b-h20"))
        self._until = (0, asyncio.Event())
        self.unread = threading.Semaphore(_UNREAD)

    def after(self, events: int) -> asyncio.Event:
        """Is set when so many further events are applied."""
        self._until = (self.counters.events + events, asyncio.Event())
        return self._until[1]

    def apply(self, event: StateEvent) -> None:
        super().apply(event)
        self.prefill()
        self.unread.release()
        events, reached = self._until
        if self.counters.events == events:
            reached.set()


async def applied_us(url: str, decode: list[WorkerView], calls: int) -> float:
    """CPU time of this thread per publication, from reading the event to the new lists of workers."""
    store = StateStore(url, NAMESPACE, timeout_s=_PATIENCE_S)
    copy = FollowingCopy(store)
    try:
        await copy.start()
        applied = copy.after(calls)
        start_s = time.thread_time()
        publishing = asyncio.create_task(asyncio.to_thread(asyncio.run, _publish(url, decode, calls, copy.unread)))
        async with asyncio.timeout(_PATIENCE_S):
            await applied.wait()
        used_s = time.thread_time() - start_s
        await publishing
        return round(1e6 * used_s / calls, 1)
    finally:
        await copy.stop()
        await store.close()


async def _publish(url: str, views: list[WorkerView], calls: int, unread: threading.Semaphore) -> None:
    store = StateStore(url, NAMESPACE, timeout_s=_PATIENCE_S)
    try:
        for number in range(calls):
            if not unread.acquire(timeout=_PATIENCE_S):
                raise RunError("the local copy has not read the last publications")
            await store.publish_worker(views[number % len(views)], LEASE_S)
    finally:
        await store.close()


async def _timed_s(call: Callable[[], Awaitable[Any]]) -> float:
    start_s = time.perf_counter()
    await call()
    return time.perf_counter() - start_s


async def _measure_all(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes; each is printed at once, except with --json."""
    results = []
    for count in sorted({sessions for _, sessions in options.sizes}):
        names = await bind(url, count)
        # The workers of a smaller size are among those of the next.
        for workers in sorted(workers for workers, sessions in options.sizes if sessions == count):
            results.append(await measure(url, workers, names, options.calls))
            if not options.json:
                print(row(results[-1]), flush=True)
    return results


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", help="with --sessions: each number with each of these")
    parser.add_argument("--sessions", type=int, nargs="+", help="with --workers; default: the sizes of the page")
    parser.add_argument("--calls", type=int, default=300, help="measured calls of each kind")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    if bool(options.workers) != bool(options.sessions):
        parser.error("--workers and --sessions belong together")
    options.sizes = tuple(product(options.workers, options.sessions)) if options.workers else SIZES
    now = circumstances()
    if not options.json:
        print(f"{in_words(now)}; CPU time in us\n\n{markdown_table.head(_COLUMNS)}", flush=True)
    try:
        with EmbeddedRedis() as server:
            results = asyncio.run(_measure_all(server.url, options))
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"benchmark": "scaling", **now, "sizes": results}))
    return 0


_COLUMNS = (
    "workers",
    "sessions",
    "view",
    "PING, Redis",
    "route, Redis",
    "publish, Redis",
    "+ per coordinator",
    "publish, worker",
    "applied, coordinator",
    "snapshot",
    "Redis memory",
)


def table(sizes: list[dict[str, Any]]) -> str:
    """The table of sizes that were measured."""
    return "\n".join([markdown_table.head(_COLUMNS), *map(row, sizes)])


def row(size: dict[str, Any]) -> str:
    """A size as a line of the table."""
    view_kb = size["view_bytes"] / 1e3
    cells = [f"{size['workers']:,}", f"{size['sessions']:,}", f"{view_kb:.{1 if view_kb < 10 else 0}f} kB"]
    cells += [f"{size[name]['redis_us']:.0f}" for name in ("ping", "route", "publish")]
    cells += [f"{size['to_one_us']:.0f}", f"{size['publish']['caller_us']:,.0f}", f"{size['applied_us']:,.0f}"]
    return markdown_table.row([*cells, f"{size['snapshot_ms']:.0f} ms", f"{size['redis_mb']:.1f} MB"])


if __name__ == "__main__":
    sys.exit(main())
