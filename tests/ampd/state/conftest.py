"""Shared state to test on: the in-memory twin and a real Redis behind one fixture."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from ampd.state.redis_store import StateStore, Watcher, open_store
from ampd.state.store import RoleAssigned, RouteWrite, StateEvent
from ampd.types import PrefillTask, Role, Slo, WorkerView
from tests.memory_store import MemoryState, MemoryStore
from tests.waiting import PATIENCE_S, until


class Cluster:
    """One namespace of shared state, on which a test opens as many handles as it plays processes."""

    def __init__(self, redis_url: str | None) -> None:
        self._redis_url = redis_url
        self._namespace = uuid.uuid4().hex
        self._memory = MemoryState()
        self._stores: list[StateStore] = []

    async def store(self, clock: Callable[[], float] = time.monotonic) -> StateStore:
        store: StateStore
        if self._redis_url is None:
            store = MemoryStore(self._memory, clock)
        else:
            store = await open_store(self._redis_url, self._namespace, clock=clock, timeout_s=PATIENCE_S)
        self._stores.append(store)
        return store

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture(params=["memory", "redis"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    url = request.getfixturevalue("redis_server").url if request.param == "redis" else None
    cluster = Cluster(url)
    yield cluster
    await cluster.close()


class Make:
    """Builders of the records that tests write."""

    def task(self, task_id: str = "t1", session_id: str = "s1", arrival_s: float | None = None) -> PrefillTask:
        arrival_s = time.monotonic() if arrival_s is None else arrival_s
        return PrefillTask(task_id, session_id, 100, 20, arrival_s, Slo(ttft_s=1.0, itl_s=0.05))

    def view(self, worker_id: str = "d1", role: Role = Role.DECODE, **fields: object) -> WorkerView:
        return WorkerView(worker_id=worker_id, role=role, **fields)  # type: ignore[arg-type]

    def role(
        self, worker_id: str = "d1", role: Role = Role.PREFILL, label: str = "", reason: str = "test"
    ) -> RoleAssigned:
        return RoleAssigned(worker_id, role, label, reason)

    def write(
        self, session_id: str = "s1", worker_id: str = "d1", epoch: int = 0, task_id: str = "t1", at: str = ""
    ) -> RouteWrite:
        return RouteWrite(session_id, worker_id, epoch, at or worker_id, self.task(task_id, session_id))


@pytest.fixture
def make() -> Make:
    return Make()


class Waiting:
    """Waiting for what must come to be, without a time that it may take."""

    until = staticmethod(until)

    async def events(self, watcher: Watcher, count: int) -> list[StateEvent]:
        async with asyncio.timeout(PATIENCE_S):
            return [await anext(watcher) for _ in range(count)]


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()
