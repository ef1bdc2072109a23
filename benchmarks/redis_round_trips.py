"""Round trips to Redis per round, and the time of a routing decision's one write against a bare PING.

    python benchmarks/redis_round_trips.py [--json] [--url URL] [--rounds 200] [--sessions 16] [--calls 5000]

Round trips: sessions run rounds one after the other against one decode worker, with the product's own store and
publisher; engine and network between the components are left out, a round sleeps instead. `server` is what Redis itself
counted meanwhile (INFO commandstats) and must agree. Time: `route` and `PING` in turn on the same connection.
Without --url a private Redis is started (unix socket); --tcp asks it over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from redis.asyncio import Redis

from ampd.cli.serve.settings import claim_port
from ampd.errors import RunError, UserError
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore
from ampd.state.store import RouteWrite, SessionLimits
from ampd.types import PrefillTask, Role, Slo, WorkerView
from workers.pending_changes import PendingChanges
from workers.publisher import Publisher

NAMESPACE = "benchmark-redis-round-trips"
LEASE_S = 5.0
SESSION_TTL_S = 60.0
PREFILL_S, DECODE_S, TOOL_S = 0.05, 0.2, 0.1


class Worker:
    """A decode worker's share of a round, as far as it concerns the shared state."""

    def __init__(self, store: StateStore) -> None:
        self.queue: list[PrefillTask] = []
        self.decoding = 0
        self.changes = PendingChanges()
        self.publisher = Publisher(store, "d1", self._view, self.changes, LEASE_S)

    def _view(self) -> WorkerView:
        return WorkerView("d1", Role.DECODE, queue=tuple(self.queue), decode_batch=self.decoding)

    async def run(self, task: PrefillTask) -> None:
        self.queue.append(task)
        self.changes.changed()
        await asyncio.sleep(PREFILL_S)
        self.queue.remove(task)
        self.changes.finished(task.task_id)
        self.decoding += 1
        self.changes.changed()
        await asyncio.sleep(DECODE_S)
        self.decoding -= 1
        self.changes.sampled()
        self.changes.held(task.session_id, task.context_tokens)
        self.changes.changed()


def make_task(session: int, number: int) -> PrefillTask:
    """A later round of an agent."""
    return PrefillTask(f"{session}-{number}", f"s{session}", 4000, 300 + number, time.monotonic(), Slo(1.0, 0.05))


async def count_trips(url: str, sessions: int, rounds: int) -> dict[str, Any]:
    """Round trips of `sessions` concurrent sessions that run `rounds` rounds together."""
    coordinator, worker_store = StateStore(url, NAMESPACE), StateStore(url, NAMESPACE)
    worker = Worker(worker_store)
    await worker.publisher.start()
    probe = Redis.from_url(url)

    async def session(number: int) -> None:
        await asyncio.sleep(number * (PREFILL_S + DECODE_S + TOOL_S) / sessions)
        for count in range(rounds // sessions):
            task = make_task(number, count)
            epoch = 1 if count else 0
            await coordinator.route(RouteWrite(task.session_id, "d1", epoch, "d1", task), SessionLimits(SESSION_TTL_S))
            await worker.run(task)
            await asyncio.sleep(TOOL_S)

    before = [coordinator.round_trips.calls.total(), worker_store.round_trips.calls.total(), await served(probe)]
    await asyncio.gather(*(session(number) for number in range(sessions)))
    await worker.publisher.retire()
    after = [coordinator.round_trips.calls.total(), worker_store.round_trips.calls.total(), await served(probe)]
    for number in range(sessions):
        await coordinator.end_session(f"s{number}")
    done = sessions * (rounds // sessions)
    by_coordinator, by_worker, by_server = (late - early for late, early in zip(after, before, strict=True))
    await asyncio.gather(coordinator.close(), worker_store.close(), probe.aclose())
    return {
        "sessions": sessions,
        "rounds": done,
        "coordinator_per_round": round(by_coordinator / done, 2),
        "worker_per_round": round(by_worker / done, 2),
        "server_per_round": round(by_server / done, 2),
    }


async def served(probe: Any) -> int:
    """Scripts that the server has run for anybody."""
    commands = await probe.info("commandstats")
    return sum(int(commands.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("eval", "evalsha"))


async def time_route(url: str, calls: int) -> dict[str, Any]:
    """Medians of `route` and PING in turn, in microseconds."""
    store = StateStore(url, NAMESPACE)
    raw: Any = Redis.from_url(url, protocol=2)
    route_us: list[float] = []
    ping_us: list[float] = []
    raw_us: list[float] = []
    for number in range(calls):
        task = make_task(number % 100, number // 100)
        write = RouteWrite(task.session_id, "d1", 0, f"p{number % 64}", task)
        start_s = time.perf_counter()
        await raw.execute_command("PING")
        raw_done_s = time.perf_counter()
        await store.ping()
        ping_done_s = time.perf_counter()
        await store.route(write, SessionLimits(SESSION_TTL_S))
        route_us.append((time.perf_counter() - ping_done_s) * 1e6)
        ping_us.append((ping_done_s - raw_done_s) * 1e6)
        raw_us.append((raw_done_s - start_s) * 1e6)
    await asyncio.gather(store.close(), raw.aclose())
    medians = {"raw_ping": raw_us, "ping": ping_us, "route": route_us}
    figures: dict[str, Any] = {
        f"{name}_p50_us": round(statistics.median(values), 1) for name, values in medians.items()
    }
    figures["route_p99_us"] = round(statistics.quantiles(route_us, n=100)[98], 1)
    figures["route_over_raw_ping"] = round(statistics.median(route_us) / statistics.median(raw_us), 2)
    return {"calls": calls, **figures}


@contextlib.contextmanager
def redis_url(arguments: argparse.Namespace) -> Iterator[str]:
    """The Redis that was named, or a private one."""
    if arguments.url:
        yield arguments.url
        return
    port = claim_port("127.0.0.1", 0) if arguments.tcp else 0
    with EmbeddedRedis(["--port", str(port), "--bind", "127.0.0.1"]) as server:
        yield f"redis://127.0.0.1:{port}/0" if port else server.url


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    counts = [1, arguments.sessions]
    trips = [
        await count_trips(url, sessions, max(sessions, arguments.rounds * sessions // max(counts)))
        for sessions in counts
    ]
    return {"benchmark": "redis_round_trips", "trips": trips, "time": await time_route(url, arguments.calls)}


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--url", help="a Redis to use instead of a private one")
    parser.add_argument("--tcp", action="store_true", help="ask the private Redis over TCP")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of the concurrent sessions together")
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions")
    parser.add_argument("--calls", type=int, default=5000, help="timed calls of each kind")
    arguments = parser.parse_args()
    try:
        with redis_url(arguments) as url:
            result = asyncio.run(measure(url, arguments))
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{'sessions':>8} {'rounds':>6} {'coordinator/round':>18} {'worker/round':>13} {'server/round':>13}")
    for row in result["trips"]:
        per_round = "{coordinator_per_round:>18} {worker_per_round:>13} {server_per_round:>13}"
        print(f"{row['sessions']:>8} {row['rounds']:>6} " + per_round.format(**row))
    for name, value in result["time"].items():
        print(f"{name:<20} {value:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
