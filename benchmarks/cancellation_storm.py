"""Thousands of clients that leave at random moments, and what is left in coordinators and workers afterwards.

    python -m benchmarks.cancellation_storm [--json] [--clients 10000] [--at-once 100] [--seed 1]

Two coordinators (one routes each prefill to a prefill worker, one to none), two prefill and two decode workers with the
modelled engine share one event loop and a private Redis. Each client begins a round that would decode for about 20 s.
A thread lets it leave 10 us to 0.5 s (log-uniform) after its request or, every second time, after its first token, so
that the moment has nothing to do with the turns of the event loop. It leaves as Dynamo shows it: the context is
stopped, the answer's generator is dropped, or both. Half of the rounds belong to named sessions, whose clients come
back.

When the last client has gone, everything that belongs to a round must go, too, within `--bound-s`. Then the sessions
are ended, and everything that belongs to a session must go. Exit code 1: something stayed, a round failed, or a round
ran to its end without its client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop
from dynamo.runtime import Context

from ampd.background_tasks import InBackground
from ampd.call_signatures import Signer
from ampd.handler_stream import HandlerStream
from ampd.perf.corrections import CorrectedModel
from ampd.perf.model import PerformanceModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore, open_store
from ampd.tiny_model import tiny_model_path
from ampd.types import Parallelism
from ampd.wire import KvReply, KvRequest
from router.coordinator import Coordinator
from router.policies import CoordinatorPolicies
from router.round_errors import WorkerLostError
from router.settings import CoordinatorSettings
from workers.client_rounds import ClientRounds
from workers.engines.modelled import ModelledEngine
from workers.engines.modelled_tokens import read_model_folder
from workers.engines.supervised import SupervisedEngine
from workers.parts import WorkerParts
from workers.round_ends import RoundEnds
from workers.session_releaser import SessionEnds
from workers.settings import WorkerSettings

NAMESPACE = "benchmark-cancellation-storm"
SHORTEST_S, LONGEST_S = 10e-6, 0.5
OUTPUT_TOKENS = 2000
KV_TOKENS = 10_000_000
SESSIONS = 200
TTL_S = 1.0
LEASE_S = 60.0  # on a busy machine all of this is one process, whose event loop may stand still for seconds
POLL_S = 0.005
WAYS = ("stopped", "dropped", "both")
COMPLETE = "ran to its end without a client"
LEFT_EARLY, LEFT_LATE = "left before the first token", "left after it"


class Times(PerformanceModel):
    """A performance model in which each stage of a round is wide enough to be left in."""

    def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.002 + 20e-6 * incr_tokens

    def decode_step_s(self, batch: int, context_tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.01

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return 0.004

    def reload_s(self, tokens: int, parallelism: Parallelism) -> float:  # noqa: ARG002
        return 0.0


class LocalWorkers:
    """The calls of coordinators and workers to workers in this process, cancelled as Dynamo cancels them."""

    def __init__(self) -> None:
        self.parts: dict[str, WorkerParts] = {}
        self._answering: dict[str, ClientRounds] = {}
        self._ends: list[InBackground] = []

    async def close(self) -> None:
        """Close the connections over which the ends of rounds are told."""
        for ends in self._ends:
            await ends.stop()

    async def prefill(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[Any]:
        return HandlerStream(partial(self.parts[worker_id].rounds.prefill, request), context=context)

    async def hand_on(self, frame: Any, worker_id: str, request: Any) -> None:
        raise NotImplementedError

    async def generate(self, worker_id: str, request: Any, context: Any) -> AsyncIterator[Any]:
        if worker_id not in self._answering:
            ends = RoundEnds(worker_id, Signer((), worker_id))
            parts = self.parts[worker_id]
            sessions = SessionEnds(parts.store, worker_id)
            sessions.start()
            self._ends += [ends, sessions]
            self._answering[worker_id] = ClientRounds(worker_id, parts.rounds, cast(Any, self), ends, sessions)
        return HandlerStream(partial(self._answering[worker_id].serve, request, context), context=context)

    async def lives(self, worker_id: str) -> bool:
        return worker_id in self.parts

    async def kv(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        try:
            return await self.call(worker_id, request, timeout_s)
        except TimeoutError:
            raise WorkerLostError(worker_id, "no answer") from None

    async def call(self, worker_id: str, request: KvRequest, timeout_s: float) -> KvReply:
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(0)  # as over the network, the answer comes in a later turn
            return await self.parts[worker_id].rounds.kv(request)


@dataclass
class Graph:
    """The parts of one storm."""

    stores: list[StateStore] = field(default_factory=list)
    workers: LocalWorkers = field(default_factory=LocalWorkers)
    coordinators: list[Coordinator] = field(default_factory=list)

    async def of_rounds(self) -> dict[str, int]:
        """What must be zero when no round is in progress."""
        parts, coordinators = self.workers.parts.values(), self.coordinators
        engines: list[Any] = [part.engine for part in parts]
        directories = [engine.kv.store.directory for engine in engines]
        for directory in directories:
            directory.collect(time.monotonic())
        return {
            "rounds at coordinators": sum(coordinator.running for coordinator in coordinators),
            "lost rounds": sum(len(coordinator._ends._lost) for coordinator in coordinators),
            "background work": sum(len(coordinator._background._tasks) for coordinator in coordinators),
            "rounds at workers": sum(part.rounds.running for part in parts),
            "queue entries at workers": sum(len(part.queue) for part in parts),
            "engine requests": sum(len(engine._engine._requests.alive) for engine in engines),
            "requests with protected KV": sum(len(directory._requests) for directory in directories),
            "KV leases": sum(len(directory._leases) for directory in directories),
            "KV writes": sum(len(directory._writers) for directory in directories),
            "queue entries in Redis": sum(len(view.queue) for view in await self.stores[0].snapshot()),
        }

    async def of_sessions(self, names: Sequence[str]) -> dict[str, int]:
        """What must be zero when all sessions have ended.

        A worker may know a session of which it has no KV; like its sweeper does, forget those after their TTL.
        """
        for part in self.workers.parts.values():
            await part.sessions.release_idle()
        bindings = [await self.stores[0].binding(name) for name in names]
        return {
            "bindings in Redis": sum(binding is not None for binding in bindings),
            "session tokens": sum(part.engine.kv.session_tokens for part in self.workers.parts.values()),
            "kept sessions": sum(len(part.sessions._uses) for part in self.workers.parts.values()),
        }


@asynccontextmanager
async def graph() -> AsyncIterator[Graph]:
    """Coordinators and workers that serve."""
    made = Graph()
    folder = tiny_model_path()
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        stack.push_async_callback(made.workers.close)

        async def store() -> StateStore:
            opened = await open_store(redis.url, NAMESPACE)
            stack.push_async_callback(opened.close)
            made.stores.append(opened)
            return opened

        for role in ("prefill", "decode"):
            for number in range(2):
                await _start_worker(f"{role}{number}", role, folder, made.workers, await store(), stack)
        for routing in ("always-remote", "always-local"):
            settings = CoordinatorSettings(
                model=folder,
                perf="tiny-cpu",
                routing=routing,
                state_url=redis.url,
                namespace=NAMESPACE,
                log_rounds="none",
                lease_s=LEASE_S,
                ttft=LEASE_S,  # no round is refused because of load
            )
            coordinator = Coordinator(
                settings, cast(Any, made.workers), await store(), CoordinatorPolicies.of(settings)
            )
            await coordinator.start()
            stack.push_async_callback(coordinator.stop)
            made.coordinators.append(coordinator)
        yield made


async def _start_worker(
    worker_id: str, role: str, folder: Path, workers: LocalWorkers, store: StateStore, stack: AsyncExitStack
) -> None:
    model: Any = Times()
    engine = SupervisedEngine(
        ModelledEngine(read_model_folder(folder), model, Parallelism(), KV_TOKENS, KV_TOKENS), model
    )
    await engine.start()
    stack.push_async_callback(engine.stop)
    settings = WorkerSettings(
        role=role,  # type: ignore[arg-type]
        engine="modelled",
        model=folder,
        log_rounds="none",
        session_ttl_s=TTL_S,
        lease_s=LEASE_S,
    )
    ordering = create_named("ordering", defaults.ORDERING)
    times = CorrectedModel(model, Parallelism())
    parts = workers.parts[worker_id] = WorkerParts(worker_id, settings, engine, store, times, ordering)
    engine.kv.connect(workers, parts.held)
    await parts.publisher.start()
    stack.push_async_callback(parts.publisher.retire)


@dataclass
class Client:
    """One client and how its round ended."""

    number: int
    way: str
    after_s: float
    sees_a_token: bool
    session_id: str | None
    request: dict[str, Any]
    end: str = ""


def clients_of(count: int, seed: int) -> list[Client]:
    """Clients with random prompts, moments and ways to leave. The prompts of a session have a common beginning."""
    rng = random.Random(seed)
    span = math.log(LONGEST_S / SHORTEST_S)
    clients = []
    for number in range(count):
        name = f"s{number // 2 % SESSIONS}" if number % 2 else None
        prompt_rng = random.Random(f"{seed} {name or number}")
        prompt = [prompt_rng.randrange(10, 250) for _ in range(rng.randrange(40, 1000))]
        request = {
            "token_ids": prompt,
            "stop_conditions": {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
            "agent_context": {"session_id": name},
        }
        after_s = SHORTEST_S * math.exp(rng.random() * span)
        clients.append(Client(number, WAYS[number % len(WAYS)], after_s, rng.random() < 0.5, name, request))
    return clients


class Leavers(threading.Thread):
    """Lets clients leave at their moments, without regard to the turns of the event loop."""

    def __init__(self) -> None:
        super().__init__(name="leavers", daemon=True)
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._has_ended = False

    def leave(self, after_s: float, go: Callable[[], None]) -> None:
        with self._changed:
            self._due.append((time.monotonic() + after_s, go))
            self._due.sort(key=lambda due: due[0])
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._due and not self._has_ended:
                    self._changed.wait()
                if not self._due:
                    return
                left_s = self._due[0][0] - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                go = self._due.pop(0)[1]
            go()


async def _visit(client: Client, coordinator: Coordinator, leavers: Leavers) -> None:
    """One round, until its client leaves."""
    context: Any = Context(f"client-{client.number}")
    loop = asyncio.get_running_loop()
    tokens = 0

    async def read() -> None:
        nonlocal tokens
        async for chunk in coordinator.generate(client.request, context):
            if client.sees_a_token and not tokens:
                leavers.leave(client.after_s, go)
            if chunk.get("event") == "error":
                raise RuntimeError(chunk["comment"][0])
            tokens += len(chunk["token_ids"])

    reading = asyncio.create_task(read())

    def go() -> None:
        if client.way != "dropped":
            context.stop_generating()
        if client.way != "stopped":
            loop.call_soon_threadsafe(reading.cancel)

    if not client.sees_a_token:
        leavers.leave(client.after_s, go)
    await asyncio.wait({reading})
    if not reading.cancelled() and (error := reading.exception()) is not None:
        client.end = f"failed: {error!r}"
    elif tokens >= OUTPUT_TOKENS:
        client.end = COMPLETE
    else:
        client.end = LEFT_LATE if tokens else LEFT_EARLY


async def storm(count: int, at_once: int, seed: int, bound_s: float) -> dict[str, Any]:
    """Run a storm.

    Returns:
        How the rounds ended, how long their rests stayed, and the figures that are not zero after the bound.
    """
    async with graph() as made:
        leavers = Leavers()
        leavers.start()
        try:
            # What the first rounds create once (connections, pools of threads) is no leak.
            await _visit_all(clients_of(2 * at_once, seed + 1), made, leavers, at_once)
            await _settled(made.of_rounds, bound_s)
            before = _of_process()
            clients = clients_of(count, seed)
            start_s = time.monotonic()
            await _visit_all(clients, made, leavers, at_once)
            end_s = time.monotonic()
            rounds = await _settled(made.of_rounds, bound_s)
            settled_s = time.monotonic() - end_s
        finally:
            leavers.end()
        names = [f"s{number}" for number in range(SESSIONS)]
        await _end_sessions(names, made)
        sessions = await _settled(lambda: made.of_sessions(names), bound_s)
        process = await _settled(lambda: _grown(before), bound_s)
        return {
            "python": platform.python_version(),
            "clients": count,
            "seconds": round(end_s - start_s, 1),
            "ways": Counter(client.way for client in clients),
            "ends": Counter(client.end for client in clients),
            "zero_after_s": round(settled_s, 3),
            "left": {name: number for name, number in {**rounds, **sessions, **process}.items() if number},
        }


async def _visit_all(clients: Sequence[Client], made: Graph, leavers: Leavers, at_once: int) -> None:
    room = asyncio.Semaphore(at_once)

    async def visit(client: Client) -> None:
        async with room:
            await _visit(client, made.coordinators[client.number // 4 % 2], leavers)

    await asyncio.gather(*map(visit, clients))


async def _end_sessions(names: Sequence[str], made: Graph) -> None:
    for name in names:
        agent = {"session_id": name, "session_final": True}
        request = {"token_ids": [10], "stop_conditions": {"max_tokens": 0}, "agent_context": agent}
        context: Any = Context(f"end-{name}")
        async for _ in made.coordinators[0].generate(request, context):
            pass


async def _settled(figures: Callable[[], Awaitable[dict[str, int]]], bound_s: float) -> dict[str, int]:
    """The figures when all are zero, or after `bound_s`."""
    end_s = time.monotonic() + bound_s
    while any((found := await figures()).values()) and time.monotonic() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return found


def _of_process() -> dict[str, int]:
    return {"asyncio tasks": len(asyncio.all_tasks()), "threads": threading.active_count()}


async def _grown(before: Mapping[str, int]) -> dict[str, int]:
    """By how much this process has more than before."""
    return {f"more {name}": max(0, number - before[name]) for name, number in _of_process().items()}


def is_clean(result: Mapping[str, Any]) -> bool:
    """Whether nothing stayed, and every round ended because its client had left."""
    return not result["left"] and result["ends"].keys() <= {LEFT_EARLY, LEFT_LATE}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=100, help="rounds in progress at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bound-s", type=float, default=10.0, help="time after which nothing may be left")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    result = uvloop.run(storm(arguments.clients, arguments.at_once, arguments.seed, arguments.bound_s))
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:>13}  {dict(value) if isinstance(value, Counter) else value}")
    return 0 if is_clean(result) else 1


if __name__ == "__main__":
    sys.exit(main())
