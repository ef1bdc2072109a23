"""A driver that plays the coordinator: it calls the workers of a graph by Dynamo, and reads the shared state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
from dynamo.runtime import Client, Context, DistributedRuntime

from ampd.keys import pack_tokens
from ampd.state.redis_store import StateStore
from ampd.types import Role, WorkerView
from ampd.wire import COMPONENT, GENERATE_ENDPOINT, KV_ENDPOINT, PREFILL_ENDPOINT, GenerateRequest, PrefillRequest
from tests.harness.graph import Graph, performance_model
from tests.waiting import PATIENCE_S


def slow_model(folder: Path) -> Path:
    """Times that hang: whatever has 1000 tokens or more takes ten minutes, longer than any test waits.

    Everything else is quick.
    """
    document = performance_model(prefill_s=0.01, long_prefill_s=600.0, step_s=0.01)
    transfers = [{"from_tokens": start, "alpha_s": s, "beta_s_per_token": 0} for start, s in ((0, 0.0), (1000, 600.0))]
    document["kv_transfers"][0]["segments"] = transfers
    path = folder / "slow.json"
    path.write_text(json.dumps(document))
    return path


@dataclass
class Driver:
    """Starts workers, calls them, reads the shared state.

    Attributes:
        runtime: Dynamo in this process.
        perf: the performance model of every worker.
    """

    graph: Graph
    runtime: DistributedRuntime
    store: StateStore
    perf: Path
    clients: dict[str, Client] = field(default_factory=dict)

    async def start(self, role: Role, *flags: str, module: str = "workers") -> str:
        """Start one worker; returns its id when it is in the shared state and can be called."""
        before = {view.worker_id for view in await self.store.snapshot()}
        name = self.graph.start_worker(role, self.perf, *flags, module=module)
        (worker_id,) = await self.until(lambda views: {view.worker_id for view in views} - before)
        self.graph.processes[worker_id] = name
        await self.until_called(worker_id)
        return str(worker_id)

    async def until_called(self, worker_id: str) -> None:
        """Wait until a worker can be called."""
        for name in (PREFILL_ENDPOINT, GENERATE_ENDPOINT, KV_ENDPOINT):
            client = await self.client(name)
            async with asyncio.timeout(PATIENCE_S):
                while int(worker_id, 16) not in client.instance_ids():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    async def client(self, endpoint: str) -> Client:
        if endpoint not in self.clients:
            path = f"{self.graph.namespace}.{COMPONENT}.{endpoint}"
            self.clients[endpoint] = await self.runtime.endpoint(path).client()
        return self.clients[endpoint]

    async def until(self, condition: Callable[[list[WorkerView]], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Wait until the shared state is as it should be; returns what `condition` gave."""
        async with asyncio.timeout(timeout_s):
            while not (result := condition(await self.store.snapshot())):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return result

    async def view(self, worker_id: str) -> WorkerView:
        views = {view.worker_id: view for view in await self.store.snapshot()}
        return views[worker_id]

    async def call(
        self, endpoint: str, worker_id: str, request: Any, context: Context | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        client = await self.client(endpoint)
        stream = await client.direct(request, int(worker_id, 16), annotated=False, context=context or Context())
        return cast(AsyncIterator[dict[str, Any]], stream)

    async def chunks(self, endpoint: str, worker_id: str, request: Any) -> list[dict[str, Any]]:
        return [chunk async for chunk in await self.call(endpoint, worker_id, request)]

    async def kv(self, worker_id: str, **request: Any) -> dict[str, Any]:
        (reply,) = await self.chunks(KV_ENDPOINT, worker_id, request)
        return reply


def message(
    token_ids: list[int], *, session: str = "s", hist: int = 0, source: str | None = None, **stop: Any
) -> PrefillRequest | GenerateRequest:
    """A round as a coordinator sends it; keywords are stop conditions."""
    return {
        "task": {
            "task_id": uuid4().hex,
            "session_id": session,
            "hist_tokens": hist,
            "incr_tokens": len(token_ids) - hist,
            "arrival_s": 0.0,
            "slo": {"ttft_s": 1.0, "itl_s": 0.1},
        },
        "prompt": pack_tokens(token_ids),
        "source": (source, None, "") if source else None,
        "is_prefilled": source is not None,
        "request": {"stop_conditions": stop},
    }


def tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


@contextmanager
def dynamo_environment(graph: Graph) -> Iterator[None]:
    """The graph's environment for Dynamo in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in graph.environment.items():
            patch.setenv(name, value)
        yield


@asynccontextmanager
async def driving(graph: Graph) -> AsyncIterator[Driver]:
    """A driver in the graph, with Dynamo in this process."""
    with dynamo_environment(graph):
        runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
        store = await graph.store()
        try:
            yield Driver(graph, runtime, store, slow_model(graph.folder))
        finally:
            await store.close()
            runtime.shutdown()
