"""A whole graph for tests: real Redis, real `dynamo.frontend`, coordinators and modelled workers, each a process.

Redis and the server that forks the processes live as long as the test session. A module's graph has its own Dynamo
namespace, discovery folder and port, so modules do not see each other's workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from ampd.child_process import reserved_ports
from ampd.cli.serve.graph import Frontend, dynamo_environment
from ampd.cli.serve.processes import ProcessSpec, Supervisor, python_module
from ampd.state.redis_store import StateStore, open_store
from ampd.tiny_model import tiny_model_path
from ampd.types import WorkerView
from tests.harness.fork_server import ForkServer
from tests.harness.watches import wait_for_watches
from tests.waiting import PATIENCE_S, until

MODEL = "tiny"
PRELOADED = (
    "ampd.perf.piecewise",
    "ampd.policies.registry",
    "ampd.state.redis_store",
    "numpy",
    "prometheus_client",
    "pydantic_settings",
    "redis.asyncio",
    "rich.live",
    "router.settings",
    "tokenizers",
    "uvloop",
    "workers.engines.modelled",
    "workers.settings",
)
"""Most of what the processes of a graph import, and nothing of Dynamo, which reads `DYN_LOG` when it is imported."""

LEASE = ("--lease-s", "10")
"""So long that a busy machine lets no lease lapse."""
SHORT_LEASE = ("--lease-s", "4")
"""For processes whose loss is found by their lease."""

_PROCESSES = 5
_PORTS = 6
"""Processes that most graphs have at a time."""

HELLO = [{"role": "user", "content": "hello"}]


def performance_model(*, prefill_s: float, long_prefill_s: float, step_s: float) -> dict[str, Any]:
    """A performance model: prompts of 1000 tokens and more take `long_prefill_s`, shorter ones `prefill_s`.

    Each token adds a little, and reads take no time, so that reading KV always pays.
    """
    return {
        "format": "ampd-performance-model/1",
        "provenance": {
            "kind": "rough",
            "source": "test",
            "model": "none",
            "gpu": "none",
            "date": "2026-01-01",
            "method": "made up",
        },
        "workers": [
            {
                "tp": 1,
                "prefill": {
                    "history_s_per_token": 0,
                    "segments": [
                        {
                            "from_incr_tokens": start,
                            "alpha_s": alpha_s,
                            "beta_s_per_token": 2e-6,
                            "gamma_s_per_token2": 0,
                        }
                        for start, alpha_s in ((0, prefill_s), (1000, long_prefill_s))
                    ],
                },
                "decode": {
                    "context_s_per_token": 0,
                    "segments": [{"from_batch": 0, "alpha_s": step_s, "beta_s_per_sequence": 0}],
                },
            }
        ],
        "kv_transfers": [
            {
                "tp_source": 1,
                "tp_target": 1,
                "segments": [{"from_tokens": 0, "alpha_s": 0, "beta_s_per_token": 0}],
            }
        ],
        "kv_bytes_per_token": 64,
    }


def profile(folder: Path, *, prefill_s: float, long_prefill_s: float, step_s: float) -> Path:
    """The file of a performance model."""
    document = performance_model(prefill_s=prefill_s, long_prefill_s=long_prefill_s, step_s=step_s)
    path = folder / f"profile-{prefill_s}-{long_prefill_s}-{step_s}.json"
    path.write_text(json.dumps(document))
    return path


def pids(supervisor: Supervisor) -> dict[str, int]:
    """Name -> process id of everything that was started."""
    return {child.spec.name: child.process.pid for child in supervisor._children}


@dataclass
class Graph:
    """The processes and how to talk to them. Names of processes are `prefill-0`, `coordinator-3`, ...

    Attributes:
        namespace: of Dynamo and of the shared state.
        port: of the frontend.
        environment: what every process gets, beside that of the tests.
        ports: for further frontends.
        processes: worker id -> name, of the workers that `new_worker` started.
    """

    folder: Path
    redis_url: str
    namespace: str
    port: int
    supervisor: Supervisor
    environment: dict[str, str]
    ports: Iterator[int]
    numbers: Iterator[int] = field(default_factory=count)
    processes: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _start(self, kind: str, module: str, *flags: str) -> str:
        name = f"{kind}-{next(self.numbers)}"
        self.supervisor.start(ProcessSpec(name, python_module(module, flags), self.environment))
        return name

    def start_worker(self, role: str, perf: Path, *flags: str, module: str = "tests.harness.scripted_worker") -> str:
        shared = [
            "--dyn-namespace",
            self.namespace,
            "--state-url",
            self.redis_url,
            "--perf",
            str(perf),
        ]
        lease = [] if "--lease-s" in flags else LEASE
        engine = ["--role", role, "--engine", "modelled", "--model", str(tiny_model_path()), "--eos-every-tokens", "0"]
        # Whole: a slice of a prompt that hangs would be too short to hang.
        whole = [] if "--slicing" in flags else ["--slicing", "whole"]
        return self._start(role, module, *engine, *shared, *lease, *whole, *flags)

    async def new_worker(
        self, role: str, perf: Path, *flags: str, module: str = "tests.harness.scripted_worker"
    ) -> str:
        """Start a worker and wait for it; returns its id, by which `processes` knows its process."""
        before = {view.worker_id for view in await self.until_views(lambda views: [*views, None]) if view}
        name = self.start_worker(role, perf, *flags, module=module)
        (worker_id,) = await self.until_views(lambda views: {view.worker_id for view in views} - before)
        self.processes[worker_id] = name
        return str(worker_id)

    def start_coordinator(self, routing: str, *flags: str, module: str = "router") -> str:
        shared = [
            "--dyn-namespace",
            self.namespace,
            "--state-url",
            self.redis_url,
            "--grace-s",
            "0.1",
            *([] if "--lease-s" in flags else LEASE),
            *([] if "--perf" in flags else ["--perf", "tiny-cpu"]),
            *([] if "--pools" in flags else ["--pools", "static"]),
        ]
        model = ["--model", str(tiny_model_path()), "--model-name", MODEL, "--dyn-tool-call-parser", "hermes"]
        return self._start("coordinator", module, *model, "--routing", routing, *shared, *flags)

    def start_frontend(self, *flags: str, coordinators: int = 1, status_relay: bool = False) -> str:
        """A frontend, by default without the status relay, so that its own answers are looked at."""
        name = f"frontend-{next(self.numbers)}"
        ttl_s = 60.0 if coordinators > 1 else None
        frontend = Frontend("127.0.0.1", self.port, self.namespace, session_ttl_s=ttl_s, status_relay=status_relay)
        spec = frontend.process(name, self.environment)
        self.supervisor.start(replace(spec, argv=(*spec.argv, *flags)))
        return name

    def start_status_relay(self) -> str:
        """Another frontend, behind the status relay; returns its URL."""
        port = next(self.ports)
        frontend = Frontend("127.0.0.1", port, self.namespace)
        self.supervisor.start(frontend.process(f"relay-{next(self.numbers)}", self.environment))
        return f"http://127.0.0.1:{port}"

    def pid(self, name: str) -> int:
        return pids(self.supervisor)[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal a process and wait until it has gone."""
        os.kill(self.pid(name), number)
        await self.until_ended(name)

    async def until_ended(self, name: str) -> str:
        """Wait until a process has ended; returns the supervisor's line about it."""
        async with asyncio.timeout(PATIENCE_S):
            while name not in (ended := self.supervisor.ended()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return ended[name]

    async def store(self) -> StateStore:
        return await open_store(self.redis_url, self.namespace, timeout_s=PATIENCE_S)

    async def until_views(self, condition: Callable[..., Any], timeout_s: float = PATIENCE_S) -> Any:
        """Wait until the shared state is as it should be; returns what `condition` gave for the workers' views."""
        store = await self.store()
        try:
            async with asyncio.timeout(timeout_s):
                while not (result := condition(await store.snapshot())):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return result
        except TimeoutError:
            raise AssertionError(f"not seen; processes that ended: {self.supervisor.ended()}") from None
        finally:
            await store.close()

    async def until_workers(self, number: int) -> list[WorkerView]:
        views: list[WorkerView] = await self.until_views(lambda views: len(views) == number and views)
        return views

    async def until_announced(self, number: int) -> None:
        """Wait until this many coordinators have told the frontends of their model."""
        async with asyncio.timeout(PATIENCE_S):
            while len(list(self.folder.glob("discovery/v1/mdc/*%2Fcoordinator%2F*"))) != number:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def until_registered(self, number: int) -> None:
        """Wait until this many coordinators are in Dynamo's discovery."""
        pattern = "discovery/v1/instances/*%2Fcoordinator%2F*"
        found: list[str] = []

        def are_there() -> bool:
            found[:] = [path.name for path in self.folder.glob(pattern)]
            return len(found) == number

        try:
            await until(are_there, poll_s=0.05)
        except TimeoutError:
            raise AssertionError(f"not {number} coordinators: {found}; ended: {self.supervisor.ended()}") from None

    async def until_answers(
        self, coordinators: list[str], statuses: tuple[int, ...] = (200,), body: dict[str, Any] | None = None
    ) -> None:
        """Wait until the frontend answers a chat with one of the statuses, through all the coordinators."""
        body = body or chat(HELLO, max_tokens=1)
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(base_url=self.url, timeout=10) as client:
            streak = 0
            while streak < 3 * len(coordinators):
                if any(coordinator in self.supervisor.ended() for coordinator in coordinators):
                    raise AssertionError(self.supervisor.ended())
                try:
                    reply = await client.post("/v1/chat/completions", json=body)
                    streak = streak + 1 if reply.status_code in statuses else 0
                except httpx.HTTPError:
                    streak = 0
                if not streak:
                    await asyncio.sleep(0.05)


def completion(prompt: Any, **options: Any) -> dict[str, Any]:
    """The body of a completion that asks for the decision record."""
    return {"model": MODEL, "prompt": prompt, "nvext": {"extra_fields": ["engine_data"]}, **options}


def chat(messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The body of a chat completion that asks for the decision record."""
    return {"model": MODEL, "messages": messages, "nvext": {"extra_fields": ["engine_data"]}, **options}


def record(reply: dict[str, Any]) -> dict[str, Any]:
    """The decision record of an answer."""
    ampd: dict[str, Any] = reply["nvext"]["engine_data"]["ampd"]
    return ampd


def session(name: str, *, final: bool = False) -> dict[str, str]:
    """Headers of one round of a session."""
    return {"x-dynamo-session-id": name, **({"x-dynamo-session-final": "true"} if final else {})}


async def ask(client: httpx.AsyncClient, prompt: list[int], name: str, tokens: int = 5) -> tuple[str, dict[str, Any]]:
    """A round of a session: its output, and its decision record."""
    reply = await client.post("/v1/completions", json=completion(prompt, max_tokens=tokens), headers=session(name))
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["text"], record(answer)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


@contextmanager
def empty_graph(folder: Path, redis_url: str, server: ForkServer) -> Iterator[Graph]:
    """A graph without processes; those that are started in it end with the block."""
    wait_for_watches(_PROCESSES)
    supervisor = Supervisor(folder, server.start)
    environment = {**dynamo_environment(folder / "discovery"), "DYN_LOG": "warn"}
    with reserved_ports("127.0.0.1", _PORTS) as ports:
        try:
            yield Graph(folder, redis_url, f"t{uuid4().hex[:8]}", ports[0], supervisor, environment, iter(ports[1:]))
        finally:
            supervisor.stop()
