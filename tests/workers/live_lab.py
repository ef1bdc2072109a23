"""Worker processes on real Dynamo and real Redis, and a driver that plays the coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from dynamo.runtime import Client, Context, DistributedRuntime

from ampd.state.connect import open_store
from ampd.state.store import StateStore
from ampd.types import Role, WorkerView
from ampd.wire import COMPONENT, GENERATE_ENDPOINT, KV_ENDPOINT, PREFILL_ENDPOINT, GenerateRequest, PrefillRequest

SLOW = {
    "workers": [
        {
            "tp": 1,
            "prefill": {
                "history_s_per_token": 0,
                "segments": [
                    {"from_incr_tokens": 0, "alpha_s": 0.01, "beta_s_per_token": 0.0, "gamma_s_per_token2": 0},
                    {"from_incr_tokens": 1000, "alpha_s": 60.0, "beta_s_per_token": 0.0, "gamma_s_per_token2": 0},
                ],
            },
            "decode": {
                "context_s_per_token": 0,
                "segments": [{"from_batch": 0, "alpha_s": 0.01, "beta_s_per_sequence": 0}],
            },
        }
    ],
    "kv_transfers": [
        {
            "tp_source": 1,
            "tp_target": 1,
            "segments": [
                {"from_tokens": 0, "alpha_s": 0.001, "beta_s_per_token": 0},
                {"from_tokens": 1000, "alpha_s": 60.0, "beta_s_per_token": 0},
            ],
        }
    ],
}
"""Times that hang: whatever has 1000 tokens or more takes a minute; everything else is quick."""


def dynamo_environment(folder: Path) -> dict[str, str]:
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Whatever is put in the list ends with the block."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


@dataclass
class Graph:
    """The driver: starts workers, calls them, reads the shared state.

    Attributes:
        runtime: Dynamo in this process.
        flags: what every worker is started with.
    """

    runtime: DistributedRuntime
    store: StateStore
    namespace: str
    flags: Sequence[str]
    started: list[subprocess.Popen[str]]
    clients: dict[str, Client] = field(default_factory=dict)

    async def start(self, role: Role, *flags: str) -> tuple[str, subprocess.Popen[str]]:
        """Start one worker; returns its id when it is in the shared state and can be called."""
        before = {view.worker_id for view in await self.store.snapshot()}
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "workers", "--role", role.value, *self.flags, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ),
        )
        self.started.append(process)
        (worker_id,) = await self.until(lambda views: {view.worker_id for view in views} - before)
        for name in (PREFILL_ENDPOINT, GENERATE_ENDPOINT, KV_ENDPOINT):
            client = await self.client(name)
            async with asyncio.timeout(10):
                while int(worker_id, 16) not in client.instance_ids():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        return worker_id, process

    async def client(self, endpoint: str) -> Client:
        if endpoint not in self.clients:
            path = f"{self.namespace}.{COMPONENT}.{endpoint}"
            self.clients[endpoint] = await self.runtime.endpoint(path).client()
        return self.clients[endpoint]

    async def until(self, condition: Callable[[list[WorkerView]], Any], timeout_s: float = 20.0) -> Any:
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
            "waited_s": 0.0,
            "ttft_s": 1.0,
            "itl_s": 0.1,
        },
        "token_ids": token_ids,
        "source_worker_id": source,
        "request": {"stop_conditions": stop},
    }


def tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


@asynccontextmanager
async def graph(folder: Path, state_url: str, flags: Sequence[str]) -> AsyncIterator[Graph]:
    """A driver with Dynamo's file discovery under `folder`; its environment must be set already."""
    assert os.environ["DYN_FILE_KV"] == str(folder)
    namespace = f"t{uuid4().hex[:8]}"
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    store = await open_store(state_url, namespace)
    with processes() as started:
        try:
            every = ["--dyn-namespace", namespace, "--state-url", state_url, *flags]
            yield Graph(runtime, store, namespace, every, started)
        finally:
            for process in started:
                process.send_signal(signal.SIGKILL)
            await store.close()
            runtime.shutdown()
