"""The live graph of the matrix: two processes of each kind, real Redis behind a proxy, all on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any
from uuid import uuid4

import httpx

from ampd.child_process import reserved_ports
from ampd.cli.serve.graph import Frontend, body_limit_mb, dynamo_environment
from ampd.cli.serve.processes import ProcessSpec, python_module
from ampd.cli.serve.settings import check_watches
from ampd.errors import UserError
from ampd.state.redis_store import StateStore, open_store
from ampd.tiny_model import TinyModel, tiny_model_path
from benchmarks.faults.inside import SOCKET_VARIABLE
from benchmarks.faults.redis_proxy import RedisProxy
from benchmarks.faults.redis_server import FaultyRedis
from tests.harness.fork_server import ForkedProcess, ForkServer
from tests.harness.graph import MODEL, PRELOADED
from tests.waiting import until

LEASE_S = 2.0
KV_TIMEOUT_S = 1.0
KINDS = ("prefill", "decode", "coordinator", "frontend")
WORKER_KINDS = KINDS[:2]
PAIR = 2
"""Processes of each kind."""

_MODULES = {
    "prefill": "benchmarks.faults.worker",
    "decode": "benchmarks.faults.worker",
    "coordinator": "benchmarks.faults.coordinator",
}
_READY = {
    "prefill": "prefill worker ",
    "decode": "decode worker ",
    "coordinator": "coordinator ",
}
"""Beginning of the log line by which a process is ready; its id follows."""

_STARTS = 3
_START_S = 120.0
"""The longest start of a process: of a real engine on a busy machine."""

_ROOM_S = 120.0
"""How long other graphs may use up the machine's inotify instances. Without one a process cannot start."""

_PATIENCE_S = 20.0
"""Timeout of the harness' own calls."""

PREFILL_S, PREFILL_S_PER_TOKEN = 0.02, 0.7e-3
READ_S = 0.2
STEP_S = 0.02


def performance_model() -> dict[str, Any]:
    """Times of the modelled engine that make each moment of a round wide enough to be hit."""

    def line(start: str, **slopes: float) -> list[dict[str, float]]:
        return [{start: 0, **slopes}]

    tokens, per_token2 = PREFILL_S_PER_TOKEN, 0.0
    return {
        "format": "ampd-performance-model/1",
        "provenance": {
            "kind": "rough",
            "source": "benchmarks.faults",
            "model": "none",
            "gpu": "none",
            "date": "2026-11-22",
            "method": "made up",
        },
        "workers": [
            {
                "tp": 1,
                "prefill": {
                    "history_s_per_token": 0,
                    "segments": line(
                        "from_incr_tokens", alpha_s=PREFILL_S, beta_s_per_token=tokens, gamma_s_per_token2=per_token2
                    ),
                },
                "decode": {
                    "context_s_per_token": 0,
                    "segments": line("from_batch", alpha_s=STEP_S, beta_s_per_sequence=0),
                },
            }
        ],
        "kv_transfers": [
            {"tp_source": 1, "tp_target": 1, "segments": line("from_tokens", alpha_s=READ_S, beta_s_per_token=0)}
        ],
        "kv_bytes_per_token": 64,
    }


@dataclass(frozen=True)
class GraphKind:
    """Of what a graph consists.

    Attributes:
        engine: of the workers. worker_flags: theirs, beside those of every graph.
        sizes: kind of process -> number of processes.
        preloaded: modules that the processes share.
        environment: of all processes.
        model: folder of the workers' model; None: the tiny model.
    """

    engine: str = "modelled"
    worker_flags: Sequence[str] = ("--eos-every-tokens", "0")
    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, PAIR))
    preloaded: Sequence[str] = PRELOADED
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Path | None = None

    def with_worker_flags(self, flags: Sequence[str]) -> GraphKind:
        """The same with further flags of all workers."""
        return replace(self, worker_flags=(*self.worker_flags, *flags))


MODELLED = GraphKind()


@dataclass(eq=False)
class Member:
    """One process of the graph.

    Attributes:
        name: of its log. kind: one of `KINDS`.
        port: of a frontend. id: of a worker or a coordinator, once it is ready. model: its folder.
        control: socket of the harness inside.
        lines: of its log, since `forget_log`.
    """

    name: str
    kind: str
    process: ForkedProcess
    log: Path
    control: Path
    model: Path
    port: int = 0
    id: str = ""
    is_ready: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    _read_bytes: int = 0
    _partial: bytes = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[int]:
        """The processes that it has started: of a frontend, which is the status relay, Dynamo's own frontend.

        Raises:
            OSError: it has ended.
        """
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def read_log(self) -> list[dict[str, Any]]:
        """All lines so far that are JSON objects."""
        with self.log.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        self._read_bytes += len(new)
        *complete, self._partial = (self._partial + new).split(b"\n")
        for line in complete:
            with suppress(ValueError):
                self.lines.append(json.loads(line))
        return self.lines

    def forget_log(self) -> None:
        """Drop the lines so far, because searches through all of them would take longer than a moment lasts."""
        self.read_log()
        self.lines.clear()

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, unless it has ended."""
        self.process.send_signal(number)

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Ask the harness inside the process.

        Raises:
            OSError, TimeoutError, ValueError: it does not answer.
        """
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(str(self.control))
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                answer: dict[str, Any] = json.loads(await reader.readline())
            finally:
                writer.close()
        return answer


class LiveGraph:
    """Starts, finds and replaces the processes.

    Attributes:
        members: the running ones, and those that a fault has ended, until `heal`.
        redis: the server behind `proxy`; a fault may replace it.
        worker_model: folder of new workers; `model` is that of the tokenizer.
    """

    def __init__(
        self, folder: Path, server: ForkServer, redis: FaultyRedis, proxy: RedisProxy, kind: GraphKind = MODELLED
    ) -> None:
        self.folder = folder
        self._kind = kind
        self.redis = redis
        self.proxy = proxy
        self.namespace = f"faults{uuid4().hex[:8]}"
        self.members: list[Member] = []
        self.model = self.worker_model = kind.model or tiny_model_path()
        self._server = server
        self._numbers: Iterator[int] = count()
        self._ports = ExitStack()
        self._perf = folder / "performance.json"
        self._perf.write_text(json.dumps(performance_model()))
        self._environment = {
            **dynamo_environment(folder / "discovery"),
            "DYN_LOGGING_JSONL": "1",
            "DYN_LOG": "info",
            "AMPD_LOG_ROUNDS": "steps",
            **kind.environment,
        }

    # -- processes

    def start(self, kind: str, model: Path | None = None, flags: Collection[str] = ()) -> Member:
        """Start a process; it is not ready yet.

        Args:
            model: its folder, if it is not the usual one. flags: of a worker or a coordinator, beside the usual ones.
        """
        model = model or (self.worker_model if kind in WORKER_KINDS else self.model)
        name = f"{kind}-{next(self._numbers)}"
        control = self.folder / f"{name}.sock"
        port = self._ports.enter_context(reserved_ports("127.0.0.1", 1))[0] if kind == "frontend" else 0
        environment = {**self._environment, SOCKET_VARIABLE: str(control)}
        if kind == "frontend":
            limit_mb = body_limit_mb(TinyModel().max_context_tokens)
            ttl_s = 60.0 if self._kind.sizes["coordinator"] > 1 else None
            frontend = Frontend("127.0.0.1", port, self.namespace, session_ttl_s=ttl_s, body_limit_mb=limit_mb)
            spec = frontend.process(name, environment)
        else:
            spec = ProcessSpec(name, python_module(_MODULES[kind], [*self._flags(kind, model), *flags]), environment)
        log = self.folder / f"{name}.log"
        process = self._server.start(spec.argv, spec.environment(os.environ), log)
        member = Member(name, kind, process, log, control, model, port)
        self.members.append(member)
        return member

    def _flags(self, kind: str, model: Path) -> list[str]:
        shared = ["--dyn-namespace", self.namespace, "--state-url", self.proxy.url, "--lease-s", str(LEASE_S)]
        shared += ["--perf", str(self._perf), "--grace-s", "0.3", "--model", str(model)]
        if kind == "coordinator":
            return [*shared, "--model-name", MODEL, "--routing", "always-remote", "--pools", "static"]
        # Slices would end each prefill at many places. Here a prefill is one span of time.
        flags = ["--role", kind, "--engine", self._kind.engine, "--slicing", "whole"]
        return [*shared, *flags, "--kv-timeout-s", str(KV_TIMEOUT_S), *self._kind.worker_flags]

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members if member.kind == kind and member.is_running]

    @property
    def workers(self) -> list[Member]:
        return self.of("prefill") + self.of("decode")

    @property
    def engine(self) -> str:
        """That of the workers."""
        return self._kind.engine

    @property
    def usual_members(self) -> frozenset[str]:
        """The names of all processes if as many of each kind run as at the start, and all of them serve; else none."""
        running = [member for member in self.members if member.is_running]
        is_usual = Counter(member.kind for member in running) == Counter(self._kind.sizes)
        return frozenset(member.name for member in running if is_usual and all(each.is_ready for each in running))

    def worker(self, worker_id: str) -> Member:
        return next(member for member in self.members if member.id == worker_id)

    async def until_ready(self, member: Member) -> None:
        """Wait until a process serves, and take its id from its log.

        Raises:
            RuntimeError: it has ended.
        """

        async def is_ready() -> bool:
            if not member.is_running:
                raise RuntimeError(f"{member.name} ended: {member.log.read_text()[-2000:]}")
            if member.kind == "frontend":
                return await _answers(member.url)
            for line in member.read_log():
                text = str(line.get("message", ""))
                if text.startswith(_READY[member.kind]) and (" is ready" in text or " serves model" in text):
                    member.id = text.removeprefix(_READY[member.kind]).split()[0]
                    return True
            return False

        await until(is_ready, _START_S, poll_s=0.02)
        member.is_ready = True

    async def started(self, kind: str, model: Path | None = None, flags: Collection[str] = ()) -> Member:
        """Start a process and wait until it is ready. The arguments are those of `start`.

        Raises:
            RuntimeError: it has ended.
        """
        for left in reversed(range(_STARTS)):
            await _until_room(1)
            member = self.start(kind, model, flags)
            try:
                await self.until_ready(member)
            except RuntimeError:  # perhaps because a busy machine was too slow, or another graph took the room
                if not left:
                    raise
            else:
                return member
        raise AssertionError

    async def end(self, member: Member, number: signal.Signals) -> None:
        """Signal a process and wait for its end."""
        member.signal(number)
        await until(lambda: not member.is_running, timeout_s=60, poll_s=0.005)

    async def replace_ended(self) -> None:
        """Start the processes that are missing, as Kubernetes would, and wait until they are ready."""
        for member in self.members:
            if member.is_running:
                member.signal(signal.SIGCONT)
        for _ in range(_STARTS):
            self.members = [member for member in self.members if member.is_running]
            sizes = self._kind.sizes
            missing = [kind for kind in KINDS for _ in range(sizes[kind] - len(self.of(kind)))]
            await _until_room(len(missing))
            for started in [self.start(kind) for kind in missing]:
                with suppress(RuntimeError):  # it has ended, perhaps because a busy machine was too slow
                    await self.until_ready(started)
            if all(len(self.of(kind)) >= sizes[kind] for kind in KINDS):
                return
        raise RuntimeError("the processes do not start")

    async def end_surplus(self, spared: Collection[Member]) -> None:
        """End the workers that are more than at the start, but for those that are spared."""
        for kind in WORKER_KINDS:
            leaving = [member for member in self.of(kind) if member not in spared]
            for member in leaving[: max(0, len(self.of(kind)) - self._kind.sizes[kind])]:
                await self.end(member, signal.SIGTERM)
        await self.until_whole()

    # -- state

    def new_redis(self) -> FaultyRedis:
        """Another, empty server."""
        redis = FaultyRedis()
        redis.__enter__()
        return redis

    async def store(self) -> StateStore:
        """The shared state, without the proxy."""
        return await open_store(self.redis.tcp_url, self.namespace, timeout_s=_PATIENCE_S)

    async def until_whole(self, timeout_s: float = 60.0) -> None:
        """Wait until every coordinator knows all workers and no others, and every frontend serves."""
        store = await self.store()
        try:
            await until(lambda: self._is_published(store), timeout_s, 0.02)
        finally:
            await store.close()
        await until(self._agree, timeout_s, 0.02)
        for member in self.of("frontend"):
            await until(lambda url=member.url: _serves(url), timeout_s, 0.05)

    def _worker_ids(self) -> list[str]:
        return sorted(member.id for member in self.workers)

    async def _is_published(self, store: StateStore) -> bool:
        return sorted(view.worker_id for view in await store.snapshot()) == self._worker_ids()

    async def _agree(self) -> bool:
        try:
            views = [await member.ask(op="debug") for member in self.of("coordinator")]
        except (OSError, TimeoutError, ValueError):
            return False
        return all(view["workers"] == self._worker_ids() and view["connected"] for view in views)

    async def figures(self) -> dict[str, dict[str, Any]]:
        """The debug views of all processes that have one, by name."""
        return {member.name: await member.ask(op="debug") for kind in KINDS[:3] for member in self.of(kind)}

    def stop(self) -> None:
        for member in self.members:
            if member.is_running:
                member.signal(signal.SIGKILL)
        self._ports.close()


async def _until_room(processes: int) -> None:
    """Wait until other graphs leave inotify instances for more processes. If they do not, the start fails."""

    def is_room() -> bool:
        with suppress(UserError):
            check_watches(processes)
            return True
        return False

    if processes:
        with suppress(TimeoutError):
            await until(is_room, _ROOM_S, poll_s=1.0)


async def _answers(url: str) -> bool:
    """Whether a frontend knows the model."""
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        with suppress(httpx.HTTPError):
            # Before the frontend behind it serves, the status relay answers with an error.
            return bool((await client.get("/v1/models")).json().get("data"))
    return False


async def _serves(url: str) -> bool:
    """Whether a frontend answers both coordinators' worth of tiny rounds."""
    body = {"model": MODEL, "prompt": [25] * 4, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        with suppress(httpx.HTTPError):
            replies = [await client.post("/v1/completions", json=body) for _ in range(PAIR)]
            return all(reply.status_code == httpx.codes.OK for reply in replies)
    return False


@asynccontextmanager
async def live_graph(folder: Path, kind: GraphKind = MODELLED) -> AsyncIterator[LiveGraph]:
    """A graph that serves; its processes end with the block."""
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(TimeoutExpired))  # the processes that do not end in time end with this one
        server = stack.enter_context(ForkServer(kind.preloaded))
        redis = stack.enter_context(FaultyRedis())
        proxy = await stack.enter_async_context(RedisProxy(redis.port))
        graph = LiveGraph(folder, server, redis, proxy, kind)
        stack.callback(lambda: graph.redis.__exit__())  # a fault may have replaced the first one
        stack.callback(graph.stop)
        await graph.replace_ended()
        await graph.until_whole()
        yield graph
