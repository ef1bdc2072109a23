# ruff: noqa: ASYNC110
"""A Redis that answers but refuses, or that moves to another server: workers stay, and rounds are placed."""

from __future__ import annotations

import asyncio
import random
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from ampd.background_tasks import BackgroundTasks
from ampd.errors import UserError
from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.serving.admission import Admission
from ampd.serving.placement import PlacementPolicies
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import SessionLimits, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import CoordinatorView, Role, Slo, WorkerView
from router.admission import AdmissionGate
from router.coordinator_publisher import CoordinatorViewPublisher
from router.placement import Placement, Placer
from router.request import parse_round
from router.round_errors import WorkerLostError
from router.round_window import Counts
from router.session_memory import UNKNOWN
from router.targets import TargetLimits
from router.worker_access import LeaseProbe
from tests.harness.sentinels import Sentinels
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.tcp_redis import TcpRedis
from tests.harness.tls_proxy import make_certificate, needs_openssl
from tests.harness.tls_sentinels import tls_sentinels
from tests.waiting import PATIENCE_S
from workers.pending_changes import PendingChanges
from workers.publisher import Publisher

LEASE_S = 1.0
LEASES = 3
SLO = Slo(2.0, 0.1)


class Calls:
    """The workers' KV endpoints, of which some do not answer."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    async def kv(self, worker_id: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:  # noqa: ARG002
        if worker_id in self.dead:
            raise WorkerLostError(worker_id, "gone")
        return {"matched": 0}


class NoHistory:
    def shared(self, _: Sequence[WorkerView]) -> dict[str, int]:
        return {}

    async def held_by(self, _: WorkerView) -> int:
        return 0


class Graph:
    """Two decode workers and a prefill worker with their publishers, and a coordinator's view and placer."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self.calls = Calls()
        self.publishers: dict[str, Publisher] = {}
        self.view = ClusterView(store, lease_s=LEASE_S)
        model, rng = load_performance_model("tiny-cpu"), random.Random(1)
        policies = PlacementPolicies(
            registry.create("binding", "least-kv"), registry.create("routing", "always-remote"), model, rng
        )
        gate = AdmissionGate(Admission(0, 0, model, SLO, rng), self.view, lambda: 1, Counts())
        self._placer = Placer(
            self.view, store, policies, SessionLimits(60.0), 60.0, gate, BackgroundTasks().spawn, Counts()
        )
        self._rounds = 0

    async def add_worker(self, store: StateStore, worker_id: str, role: Role) -> None:
        view = WorkerView(worker_id, role, kv_capacity_tokens=10_000, max_context_tokens=1000)
        publisher = Publisher(store, worker_id, lambda: view, PendingChanges(), LEASE_S)
        self.publishers[worker_id] = publisher
        await publisher.start()

    async def place(self) -> Placement:
        self._rounds += 1

        request = {"token_ids": [1] * 64, "agent_context": {"session_id": f"session-{self._rounds}"}}
        round_ = parse_round(request, TargetLimits(SLO))
        run: Any = SimpleNamespace(
            request=round_,
            session_id=round_.session_id,
            session=UNKNOWN,
            history=NoHistory(),
            request_id="",
            deaths=SimpleNamespace(prompt_digest=""),
            arrival_s=time.monotonic(),
            binding=None,
            holder=None,
            may_move=False,
            is_admitted=False,
            goes_on=False,
            local_only=None,
            avoided=set(),
        )
        return await self._placer.place(run)

    def is_complete(self) -> bool:
        return len(self.view.decode()) == 2 and len(self.view.prefill()) == 1

    async def serves_for(self, duration_s: float) -> None:
        """All workers stay, and every round is placed."""
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            assert self.is_complete()
            assert (await self.place()).plan.decision.worker_id == "b1"
            await asyncio.sleep(0.05)

    async def is_normal(self) -> bool:
        if not self.is_complete() or not all(publisher.available for publisher in self.publishers.values()):
            return False
        try:
            workers = await self.store.snapshot()
        except StateUnavailableError:  # slow, because the machine is
            return False
        return len(workers) == 3 and (await self.place()).is_shared


@asynccontextmanager
async def graph_on(url: str) -> AsyncIterator[Graph]:
    async with AsyncExitStack() as stack:

        async def store() -> StateStore:
            opened = await open_store(url, "test", timeout_s=1.0)
            stack.push_async_callback(opened.close)
            return opened

        graph = Graph(await store())
        for worker_id, role in (("a1", Role.DECODE), ("a2", Role.DECODE), ("b1", Role.PREFILL)):
            await graph.add_worker(await store(), worker_id, role)
            stack.push_async_callback(graph.publishers[worker_id].retire)
        await stack.enter_async_context(graph.view)
        probe = LeaseProbe(graph.view, graph.calls, timeout_s=1.0, interval_s=0.05)  # type: ignore[arg-type]
        probe.start()
        stack.push_async_callback(probe.stop)
        heartbeat = CoordinatorViewPublisher(graph.store, "c1", lambda: CoordinatorView("c1", SLO), LEASE_S)
        heartbeat.start()
        stack.push_async_callback(heartbeat.stop)
        yield graph


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.05)


@pytest.fixture
def server() -> Iterator[TcpRedis]:
    with TcpRedis() as started:
        yield started


@pytest.fixture
async def admin(server: TcpRedis) -> AsyncIterator[Any]:
    async with Redis.from_url(server.tcp_url) as client:
        await client.execute_command("ACL SETUSER ampd on >secret ~* &* +@all")
        folder = (await client.config_get("dir"))["dir"]
        assert folder is not None
        (Path(folder) / "a-folder").mkdir(exist_ok=True)
        yield client


REFUSALS = {
    "full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "no right to write": ("ACL SETUSER ampd -@write", "ACL SETUSER ampd +@all"),
    "no right to publish either": ("ACL SETUSER ampd -@write -publish", "ACL SETUSER ampd +@all"),
    "no dump": (
        "CONFIG SET dbfilename a-folder; CONFIG SET save '3600 1'; BGSAVE",
        "CONFIG SET stop-writes-on-bgsave-error no",
    ),
}
RARE = {"replica", "no right to write"}
"""The other ways refuse the same writes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "refusal", [pytest.param(name, marks=pytest.mark.long) if name in RARE else name for name in REFUSALS]
)
async def test_refused_writes_take_no_worker_out(server: TcpRedis, admin: Any, refusal: str) -> None:
    begin, end = REFUSALS[refusal]
    async with graph_on(server.tcp_url.replace("//", "//ampd:secret@")) as graph:
        await until(graph.is_normal)
        for command in begin.split("; "):
            await admin.execute_command(*shlex.split(command))
        await graph.serves_for(LEASES * LEASE_S)
        assert not any(publisher.available for publisher in graph.publishers.values())
        assert not (await graph.place()).is_shared
        await admin.execute_command(*end.split())
        await until(graph.is_normal)


@pytest.mark.slow
async def test_a_worker_that_dies_while_writes_are_refused_is_found_dead(server: TcpRedis, admin: Any) -> None:
    async with graph_on(server.tcp_url) as graph:
        await until(graph.is_normal)
        await admin.execute_command("CONFIG", "SET", "maxmemory", "1")
        graph.calls.dead.add("a1")
        await graph.publishers["a1"]._task.stop()

        async def is_gone() -> bool:
            await graph.place()
            return [view.worker_id for view in graph.view.decode()] == ["a2"]

        await until(is_gone)
        await admin.execute_command("CONFIG", "SET", "maxmemory", "0")


@pytest.mark.slow
async def test_a_failover_behind_one_address(server: TcpRedis) -> None:
    with TcpRedis() as promoted:
        async with TcpProxy(server.port) as proxy, graph_on(f"redis://127.0.0.1:{proxy.port}/0") as graph:
            await until(graph.is_normal)
            proxy.target_port = promoted.port
            async with Redis.from_url(server.tcp_url) as client:
                await client.execute_command("REPLICAOF", "127.0.0.1", "1")
            await until(graph.is_normal)
            store = await open_store(promoted.tcp_url, "test")
            await graph.add_worker(store, "a3", Role.DECODE)

            async def knows_the_new_worker() -> bool:
                return graph.view.worker("a3") is not None

            await until(knows_the_new_worker)
            await until(lambda: _publish(store, 4))
            await graph.publishers["a3"].retire()
            await store.close()


@pytest.mark.long
async def test_a_failover_by_sentinels() -> None:
    with Sentinels() as servers:
        await servers.until_complete()
        await check_failover(servers, servers.url)
        with pytest.raises(UserError, match="a Sentinel listens there"):
            await open_store(servers.sentinel_url, "test")


@pytest.mark.long
@needs_openssl
async def test_a_failover_by_sentinels_with_tls(tmp_path: Path) -> None:
    async with tls_sentinels(make_certificate(tmp_path)) as (servers, url):
        await servers.until_complete()
        await check_failover(servers, url)


async def check_failover(servers: Sentinels, url: str) -> None:
    """The master ends: all processes of a graph write to the replica, and see each other there."""
    async with graph_on(url) as graph:
        await until(graph.is_normal)
        servers.master.stop()

        async def is_normal_again() -> bool:
            try:
                return await graph.is_normal()
            except StateUnavailableError:
                return False

        await until(is_normal_again)
        store = await open_store(servers.replica.tcp_url, "test")
        await until(lambda: _publish(store, 3))
        await store.close()


async def _publish(store: StateStore, workers: int) -> bool:
    """Whether all of them publish to this server."""
    return len(await store.snapshot()) == workers


async def test_a_cluster_is_refused_with_one_line() -> None:
    with TcpRedis(["--cluster-enabled", "yes"]) as node, pytest.raises(UserError, match="Cluster is not supported"):
        await open_store(node.tcp_url, "test")
