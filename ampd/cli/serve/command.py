"""The body of `ampd serve`: checks the call, starts Redis and the processes, and stops them at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ampd.call_signatures import operator_token, read_secrets
from ampd.child_process import reserved_ports
from ampd.cli.serve import settings as checks
from ampd.cli.serve.devices import default_perf, shared_gpu, visible_gpus, worker_environments
from ampd.cli.serve.graph import (
    GraphSite,
    body_limit_mb,
    graph_processes,
    live_urls,
    system_url,
    write_targets,
)
from ampd.cli.serve.processes import GraphWatch, LivenessProbe, Supervisor
from ampd.cli.serve.settings import COORDINATOR, EMBEDDED, FRONTEND, TINY, EngineName, ServeSettings
from ampd.errors import RunError, UserError
from ampd.model_folder import check_model_folder
from ampd.settings import PREFIX
from ampd.state.embedded import EmbeddedRedis, LocalGraph, register
from ampd.state.redis_connection import without_secrets
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import StateUnavailableError
from ampd.tiny_model import tiny_model_path
from ampd.types import GIB, Role
from ampd.wire import COORDINATOR_COMPONENT
from router.settings import context_length
from workers.kv.shared import default_size_bytes

# -- waits until a local graph can serve: workers have leases, and the frontend knows the model and its coordinators

_POLL_S = 0.2
_REMIND_S = 30.0
_READY_WITHIN_S = 1800.0
"""Weights of hundreds of GB may load for many minutes."""
_NO_ANSWER = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading the answer of another server than a frontend raises."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The graph that should become ready; `url`: its frontend."""

    url: str
    model_name: str
    workers: Mapping[Role, int]
    coordinators: int = 1


async def wait_until_ready(
    store: StateStore,
    expected: Expected,
    ended: Callable[[], dict[str, str]],
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Return when the expected graph can serve.

    Args:
        ended: name -> one line for each process that has ended.
        progress: gets a line about the missing parts when they change, and every 30 s.

    Raises:
        RunError: a process ended, or `timeout_s` passed; the line names the missing parts.
    """
    start_s = reported_s = time.monotonic()
    reported = ""
    async with httpx.AsyncClient(base_url=expected.url, timeout=2.0, trust_env=False) as client:
        while missing := await _missing(store, client, expected):
            for line in ended().values():
                raise RunError(f"ampd serve: {line}")
            now_s = time.monotonic()
            if now_s > start_s + timeout_s:
                raise RunError(f"ampd serve: not ready after {timeout_s:.0f} s; still missing: {missing}")
            if missing != reported or now_s > reported_s + _REMIND_S:
                progress(f"waiting for {missing}" + (f" ({now_s - start_s:.0f} s)" if missing == reported else ""))
                reported, reported_s = missing, now_s
            await asyncio.sleep(_POLL_S)


async def _missing(store: StateStore, client: httpx.AsyncClient, expected: Expected) -> str:
    live = Counter(view.role for view in await store.snapshot())
    parts = []
    if live.total() < sum(expected.workers.values()):
        # With all workers alive, a pools policy may already have changed their roles.
        parts = [
            f"{count - live[role]} {role} worker(s)" for role, count in expected.workers.items() if live[role] < count
        ]
    if not await _lists_model(client, expected.model_name):
        parts.append("the model at the frontend")
    elif (absent := expected.coordinators - await _coordinators(client)) > 0:
        # Coordinators enter discovery when a decode worker is alive.
        parts.append(f"{absent} coordinator(s) at the frontend")
    return ", ".join(parts)


async def _lists_model(client: httpx.AsyncClient, model_name: str) -> bool:
    try:
        reply = await client.get("/v1/models")
        return any(model["id"] == model_name for model in reply.json()["data"])
    except (httpx.HTTPError, *_NO_ANSWER):
        return False


async def _coordinators(client: httpx.AsyncClient) -> int:
    """Number of coordinators that the frontend has discovered (its /health lists the instances)."""
    try:
        instances = (await client.get("/health")).json()["instances"]
        return sum(instance["component"] == COORDINATOR_COMPONENT for instance in instances)
    except (httpx.HTTPError, *_NO_ANSWER):
        return 0


# -- the body of `ampd serve`: checks the call, starts Redis and the processes, and stops them at the end

_DRAIN_S = 40.0
"""A coordinator ends sooner: `--drain-s` is at most 30 s, and `--grace-s` and releases come on top."""
_STORE_SIZE = f"{PREFIX}KV_STORE_GIB"


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM (exit code 0), or until the graph cannot serve any more (1)."""
    settings = checks.read_settings(argv)
    checks.check_policies(settings)
    checks.check_workers(settings)
    checks.check_secret(settings)
    checks.check_engine(settings.engine)
    checks.check_arguments(settings)
    checks.check_session_names(settings)
    checks.check_parsers(settings)
    folder = tiny_model_path() if settings.model == TINY else Path(settings.model)
    model_path = check_model_folder(folder, "ampd serve")
    settings = settings.model_copy(update={"perf": settings.perf or default_perf(settings.model)})
    checks.check_perf(settings)
    checks.check_watches(sum(settings.start().values()) + settings.coordinators + 1)
    checks.check_replies(settings, model_path)
    checks.check_names(settings)
    port = checks.claim_port(settings.host, settings.port)
    environments = _worker_environments(settings, model_path)
    count = len(environments) + settings.coordinators if settings.metrics else 0
    with (
        _state_url(settings) as state_url,
        tempfile.TemporaryDirectory(prefix="ampd-serve-") as scratch,
        reserved_ports(settings.metrics_host, count, "serve without metrics: --no-metrics") as system_ports,
    ):
        if settings.graph_secret_file is None:
            settings = settings.model_copy(update={"graph_secret_file": _new_secret(Path(scratch))})
        site = GraphSite(
            model_path=model_path,
            model_names=tuple(settings.model_name) or (TINY if settings.model == TINY else model_path.name,),
            state_url=state_url,
            port=port,
            discovery_dir=Path(scratch) / "discovery",
            worker_env=tuple(environments),
            body_limit_mb=body_limit_mb(context_length(model_path, None)),
            system_ports=system_ports,
        )
        with _log_dir(settings) as log_dir:
            return asyncio.run(_serve(settings, site, log_dir))


def _new_secret(folder: Path) -> Path:
    """A secret for a graph that was given none. Only this user can read the folder."""
    path = folder / "secret"
    path.write_text(secrets.token_hex(32))
    return path


def _worker_environments(settings: ServeSettings, model: Path) -> list[dict[str, str]]:
    roles, cpus = settings.worker_roles(), os.cpu_count() or 1
    if settings.engine is EngineName.MODELLED:
        return worker_environments([1] * len(roles), [], cpus)
    gpus = visible_gpus()
    devices = worker_environments([settings.degree(role) for role in roles], gpus, cpus)
    limits = shared_gpu(model, len(roles)) if len(gpus) == 1 and len(roles) > 1 else {}
    # A worker's own default would leave nothing to the others. A user's value is per worker.
    store_gib = os.environ.get(_STORE_SIZE) or f"{default_size_bytes(len(roles)) / GIB:.3f}"
    own = {name: os.environ.get(name, value) for name, value in limits.items()}
    return [{**environment, **own, _STORE_SIZE: store_gib} for environment in devices]


@contextlib.contextmanager
def _state_url(settings: ServeSettings) -> Iterator[str]:
    if settings.state_url != EMBEDDED:
        yield settings.state_url
        return
    with EmbeddedRedis() as redis:
        yield redis.url


@contextlib.contextmanager
def _log_dir(settings: ServeSettings) -> Iterator[Path]:
    """The folder for logs. A temporary folder is kept after a failure because the error names a file in it."""
    chosen = Path(settings.log_dir) if settings.log_dir else Path(tempfile.mkdtemp(prefix="ampd-logs-"))
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"ampd serve: --log-dir: {chosen} is no folder that can be written ({reason}); name another"
        ) from None
    yield chosen
    if not settings.log_dir:
        shutil.rmtree(chosen, ignore_errors=True)


async def _serve(settings: ServeSettings, site: GraphSite, log_dir: Path) -> int:
    stopped, supervisor = asyncio.Event(), Supervisor(log_dir)
    _stop_at_signals(stopped, supervisor)
    try:
        store = await open_store(site.state_url, settings.namespace)
    except StateUnavailableError as error:
        raise UserError(f"ampd serve: --state-url: {error}") from None
    url = f"http://{settings.host}:{site.port}"
    if settings.state_url == EMBEDDED:
        register(
            LocalGraph(
                namespace=settings.namespace,
                state_url=site.state_url,
                url=url,
                perf=_absolute(str(settings.perf)),
                controls=_controls(settings, site),
                token=operator_token(read_secrets(settings.graph_secret_file, "ampd serve")[0]),
            )
        )
    has_served = False
    try:
        specs = graph_processes(settings, site)
        frontend = {FRONTEND: (settings.host, site.port)}
        if settings.metrics:
            targets = write_targets(log_dir, settings.metrics_host, specs, frontend)
            _progress(f"metrics: every process's address is in {targets} (for Prometheus's file_sd_configs)")
        expected = Expected(url, site.model_names[0], settings.start(), settings.coordinators)
        for spec in specs:
            supervisor.start(spec)
        waiting = wait_until_ready(store, expected, supervisor.ended, _READY_WITHIN_S, _progress)
        has_served = await _unless_stopped(waiting, stopped)
        if has_served:
            print(_ready_line(settings, site, url, log_dir), flush=True)
            urls = live_urls(settings.metrics_host, specs, frontend)
            probing = LivenessProbe(urls).task(supervisor, _progress)
            probing.start()
            try:
                await GraphWatch(settings, supervisor, site.discovery_dir, _progress).until(stopped)
            finally:
                await probing.stop()
        return 0
    finally:
        when = "when the rounds in progress have finished; Ctrl-C again stops at once"
        _progress(f"stopping, {when}" if has_served else "stopping")
        await asyncio.to_thread(_stop, supervisor)
        await store.close()


def _stop_at_signals(stopped: asyncio.Event, supervisor: Supervisor) -> None:
    """Set the event at Ctrl-C and SIGTERM, and kill all processes at the second one."""

    def interrupt() -> None:
        if stopped.is_set():
            supervisor.kill()
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)


async def _unless_stopped(work: Coroutine[Any, Any, None], stopped: asyncio.Event) -> bool:
    """Whether the work was done before the event was set, which ends it."""
    working, interrupted = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
        return working.done()
    finally:
        working.cancel()
        interrupted.cancel()


def _stop(supervisor: Supervisor) -> None:
    """Stop the coordinators first: until their rounds have finished, these need the frontend and the workers.

    The frontends are the last, because workers end through them the rounds that took too long.
    """
    supervisor.stop(_DRAIN_S, lambda name: name.startswith(COORDINATOR))
    supervisor.stop(_DRAIN_S, lambda name: name.startswith(tuple(Role)))
    supervisor.stop()


def _controls(settings: ServeSettings, site: GraphSite) -> tuple[str, ...]:
    """The system ports of the coordinators, which come after those of the workers."""
    return tuple(system_url(settings.metrics_host, port) for port in site.system_ports[len(site.worker_env) :])


def _absolute(name_or_path: str) -> str:
    """The name of a performance model, with the absolute path of its file or of its model."""
    path, at, gpu = (name_or_path, "", "") if Path(name_or_path).is_file() else name_or_path.rpartition("@")
    return f"{Path(path).resolve()}{at}{gpu}" if path and Path(path).exists() else name_or_path


def _ready_line(settings: ServeSettings, site: GraphSite, url: str, log_dir: Path) -> str:
    workers = " and ".join(f"{count} {role}" for role, count in settings.start().items())
    return (
        f"ready: {url} serves model {site.model_names[0]!r} with {workers} worker(s), engine {settings.engine}, "
        f"routing {settings.routing}, ordering {settings.ordering}, slicing {settings.slicing}, "
        f"pools {settings.pools}, performance model {settings.perf}; state {without_secrets(site.state_url)}, "
        f"logs {log_dir}; Ctrl-C stops it"
    )


def _progress(line: str) -> None:
    print(f"ampd serve: {line}", file=sys.stderr, flush=True)
