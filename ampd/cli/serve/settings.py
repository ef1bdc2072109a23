"""Settings of `ampd serve`, and their checks before anything is started. Each failure is one line with a fix."""

from __future__ import annotations

import errno
import importlib.util
import os
import shlex
import socket
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ampd.call_signatures import read_secrets
from ampd.errors import UserError
from ampd.handler_stream import MOST_JOINED_TOKENS
from ampd.perf.presets import load_performance_model, profile_names
from ampd.policies import defaults, registry
from ampd.serving.roles import prefill_at_start
from ampd.settings import GraphSettings, Names, parse_settings
from ampd.types import Parallelism, Role
from planner.manifest.files import MODEL_FILE, REHEARSAL_FILE
from router.settings import PARSER_NAMES, check_parser
from router.status_relay.sessions import chosen_sources
from workers.engines.replies import OutputPlanner, Replies

EMBEDDED = "embedded"
FRONTEND, COORDINATOR = "frontend", "coordinator"
"""Beginnings of the names of processes."""
TINY = "tiny"


class EngineName(StrEnum):
    """The engines that a worker can run."""

    SGLANG = "sglang"
    MODELLED = "modelled"


class ServeSettings(GraphSettings):
    """Start the whole graph on this machine: Redis, Dynamo frontend, coordinators and workers. Ctrl-C stops it."""

    known_names: ClassVar = {**registry.NAMES, **PARSER_NAMES, "perf": profile_names}
    topics: ClassVar = {
        "plan": "processes and model",
        "routing": "policies",
        "host": "addresses",
        "tp": "GPUs per worker",
        "dyn_tool_call_parser": "answers",
        "worker_args": "further flags, logs and metrics",
    }

    plan: Path | None = Field(
        None,
        description="Rehearse a plan with the modelled engine: a folder of `ampd plan --output-manifest`. Flags win.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Number of workers, whose roles follow the load (--pools); instead of --prefill and --decode, "
        "which say in which roles they start.",
    )
    prefill: int | None = Field(None, ge=0, le=64, description="Number of prefill workers; default: 1, with --mixed 0.")
    decode: int | None = Field(None, ge=0, le=64, description="Number of decode workers; default: 1, with --mixed 0.")
    mixed: int = Field(
        0, ge=0, le=64, description="Number of mixed workers, which own sessions and also prefill for others."
    )
    coordinators: int = Field(1, ge=1, le=16, description="Number of coordinator replicas.")
    engine: EngineName = Field(
        EngineName.SGLANG, description="Engine of the workers: real SGLang, or modelled (sleeps by the model)."
    )
    model: str = Field(TINY, description="Model folder (Hugging Face layout), or `tiny`: a small random Llama.")
    model_name: Names = Field(
        [],
        description="Name that clients use; default: the model folder's name. Repeat it for further names of the "
        "model; one with `*` stands for all names that match it.",
    )
    routing: str = Field(
        defaults.ROUTING,
        description="Policy that chooses where a round is prefilled; ampd(alpha=0.8) sets a parameter.",
    )
    binding: str = Field(defaults.BINDING, description="Policy that binds a new session to a decode worker.")
    ordering: str = Field(defaults.ORDERING, description="Order of the prefill queues.")
    slicing: str = Field(defaults.SLICING, description="What an engine computes next.")
    stream_tokens: int = Field(
        1, ge=1, le=MOST_JOINED_TOKENS, description="Tokens that a worker sends together, after a round's first one."
    )
    pools: str = Field(
        defaults.POOLS, description="Policy that changes the workers' roles while they serve; static: none changes."
    )
    host: str = Field(
        "127.0.0.1",
        description="Address that the frontend listens on. The other traffic of the graph stays on loopback.",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="Address of the metrics ports of workers and coordinators. A coordinator's can also "
        "list and end sessions.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port that the frontend listens on; 0 picks a free one.")
    status_relay: bool = Field(
        True,
        description="Put a relay before the frontend that adds `Retry-After` to refusals, names the "
        "sessions of threads and agents, and bounds what clients may send. It has neither TLS "
        "nor HTTP/2.",
    )
    session_names: str = Field(
        "",
        description="Further headers, and keys of the body, that name a session, separated by commas: "
        "x-my-run+x-my-agent,body:metadata.run. The relay reads them.",
    )
    state_url: str = Field(
        EMBEDDED,
        description="Shared state: `embedded` starts a separate Redis; otherwise redis://, rediss:// or unix://.",
    )
    tp: int = Field(1, ge=1, description="GPUs per worker (tensor parallelism).")
    prefill_tp: int | None = Field(None, ge=1, description="GPUs per prefill worker; default: --tp.")
    decode_tp: int | None = Field(None, ge=1, description="GPUs per decode worker; default: --tp.")
    mixed_tp: int | None = Field(None, ge=1, description="GPUs per mixed worker; default: --tp.")
    dyn_tool_call_parser: str | None = Field(
        None, validation_alias="dyn_tool_call_parser", description="Tool-call parser of the model (as in Dynamo)."
    )
    dyn_reasoning_parser: str | None = Field(
        None, validation_alias="dyn_reasoning_parser", description="Reasoning parser of the model (as in Dynamo)."
    )
    replies: Path | None = Field(
        None,
        description="Scripted replies for the modelled engine (JSON lines, one reply per turn).",
    )
    worker_args: str = Field(
        "", description="Further flags for every worker, as one string (python -m workers --help)."
    )
    router_args: str = Field("", description="Further flags for every coordinator (python -m router --help).")
    log_dir: str | None = Field(None, description="Folder for the processes' logs; default: a temporary one.")
    metrics: bool = Field(
        True, description="Give every process a port for its metrics, listed in metrics.json among the logs."
    )

    def start(self) -> dict[Role, int]:
        """Number of workers by the role in which they start, prefill workers first, without roles that have none."""
        if self.workers is not None:
            prefill = prefill_at_start(self.workers)
            counts = {Role.PREFILL: prefill, Role.DECODE: self.workers - prefill}
        else:
            default = 0 if self.mixed else 1
            named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
            counts = {role: default if count is None else count for role, count in named.items()}
        return {role: count for role, count in counts.items() if count}

    def worker_roles(self) -> list[Role]:
        """The role in which each worker starts, in the order of `start`."""
        return [role for role, count in self.start().items() for _ in range(count)]

    def degree(self, role: Role) -> int:
        """Tensor-parallel degree of the workers of a role."""
        named = {Role.PREFILL: self.prefill_tp, Role.DECODE: self.decode_tp, Role.MIXED: self.mixed_tp}
        return named[role] or self.tp


def read_settings(argv: Sequence[str]) -> ServeSettings:
    """The settings of a call. Those of a plan are a `--config`.

    Raises:
        UserError: a flag is wrong, or the plan cannot be rehearsed.
    """
    settings = parse_settings(ServeSettings, argv, "ampd serve")
    folder = settings.plan
    if folder is None:
        return settings
    if any(argument.partition("=")[0] == "--config" for argument in argv):
        raise UserError("ampd serve: --plan: has the settings of a --config; give the others as flags")
    rehearsal = folder / REHEARSAL_FILE
    if not rehearsal.is_file():
        raise UserError(
            f"ampd serve: --plan: {folder} has no {REHEARSAL_FILE}; it must be a folder of ampd plan "
            "--output-manifest, whose replicas of one role have one degree"
        )
    return parse_settings(
        ServeSettings, [f"--config={rehearsal}", f"--perf={folder / MODEL_FILE}", *argv], "ampd serve"
    )


# -- Checks of `ampd serve` before anything is started. Each failure is one line with the way to fix it

_WATCH_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY = "anon_inode:inotify"
WATCHES_PER_PROCESS = 7
"""Measured: 6 per worker, 8 per coordinator, 5 for the frontend."""


def check_policies(settings: ServeSettings) -> None:
    """Refuse unknown names of policies; the error lists the known ones."""
    for kind in ("binding", "routing", "ordering", "slicing", "pools"):
        registry.create_named(kind, getattr(settings, kind))


def check_workers(settings: ServeSettings) -> None:
    """Refuse a graph in which no worker owns sessions, and roles beside a number of workers without roles."""
    named = ("prefill", "decode", "mixed", "prefill_tp", "decode_tp", "mixed_tp")
    if settings.workers is not None and (given := [name for name in named if name in settings.model_fields_set]):
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"ampd serve: {flag}: --workers starts workers of any role; leave out one of the two flags")
    if not any(role.owns_sessions for role in settings.start()):
        raise UserError("ampd serve: --decode: at least one decode worker is needed, or a mixed one (--mixed)")


def check_perf(settings: ServeSettings) -> None:
    """Refuse a performance model that is missing, invalid, or without the workers' parallelism."""
    degrees = {role: Parallelism(settings.degree(role)) for role in settings.start()}
    may_change = not registry.POOLS.create_named(settings.pools).is_idle
    prefill = [degree for role, degree in degrees.items() if role.takes_prefills or may_change]
    decode = [degree for role, degree in degrees.items() if role.owns_sessions or may_change]
    try:
        load_performance_model(settings.perf).require(prefill or decode, decode)
    except UserError as error:
        raise UserError(
            f"--perf {settings.perf}: {error}; give each worker other degrees (--tp), or another --perf"
        ) from None


def check_secret(settings: ServeSettings) -> None:
    """Refuse a file of secrets that a worker could not read."""
    read_secrets(settings.graph_secret_file, "ampd serve")


def check_engine(engine: EngineName) -> None:
    """Refuse an engine whose libraries are not installed."""
    if engine is EngineName.SGLANG:
        for module in ("sglang", "nixl"):
            if importlib.util.find_spec(module) is None:
                raise UserError(
                    f"ampd serve: --engine sglang needs the package {module}; install it with "
                    "uv pip install --editable '.[sglang]' in AMPD's repository, or use --engine modelled"
                )


def check_parsers(settings: ServeSettings) -> None:
    """Refuse unknown names of parsers, which a coordinator would refuse; the error lists the known ones."""
    for field, known in PARSER_NAMES.items():
        check_parser(f"ampd serve: --{field.replace('_', '-')}", getattr(settings, field), known())


def check_session_names(settings: ServeSettings) -> None:
    """Refuse names that the relay would refuse, or that nobody would read."""
    chosen_sources(settings.session_names, "ampd serve")
    if settings.session_names and not settings.status_relay:
        raise UserError("ampd serve: --session-names: the relay reads them; leave out --no-status-relay")


def check_arguments(settings: ServeSettings) -> None:
    """Refuse further flags that cannot be split into words."""
    for field in ("worker_args", "router_args"):
        try:
            shlex.split(getattr(settings, field))
        except ValueError as error:
            flag = f"--{field.replace('_', '-')}"
            raise UserError(f"ampd serve: {flag}: {error}, in {getattr(settings, field)!r}") from None


def check_names(settings: ServeSettings) -> None:
    """Refuse a pattern of names that nothing would read."""
    if any("*" in name for name in settings.model_name[:1]):
        raise UserError(f"ampd serve: --model-name: {settings.model_name[0]!r} is a pattern; give a name before it")
    if any("*" in name for name in settings.model_name) and not settings.status_relay:
        raise UserError("ampd serve: --model-name: a name with * needs the status relay; leave out --no-status-relay")


def check_replies(settings: ServeSettings, model: Path) -> None:
    """Refuse scripted replies that the engine cannot play, with the line of the file that is wrong."""
    if settings.replies is None:
        return
    if settings.engine is not EngineName.MODELLED:
        raise UserError("ampd serve: --replies is for --engine modelled; a real engine makes its own replies")
    OutputPlanner(model, (), Replies.read(settings.replies))


def check_watches(processes: int) -> None:
    """Refuse a graph that needs more inotify instances for Dynamo's file discovery than the kernel has left.

    A process without one finds no other process. It ends or waits without an error message.
    """
    if (limit := watch_limit()) is None:
        return
    needed, used = processes * WATCHES_PER_PROCESS, used_watches()
    if needed + used > limit:
        raise UserError(
            f"ampd serve: {processes} processes need about {needed} inotify instances; {used} of the {limit} that this "
            "machine allows a user are taken; start fewer workers, end other graphs, or: "
            f"sysctl -w fs.inotify.max_user_instances={2 * (needed + used)}"
        )


def watch_limit() -> int | None:
    """Inotify instances that a user may have; None: this kernel does not tell."""
    try:
        return int(_WATCH_LIMIT.read_text())
    except (OSError, ValueError):
        return None


def used_watches() -> int:
    """Inotify instances of this user's processes."""
    return sum(_is_watch(entry) for folder in Path("/proc").glob("[0-9]*/fd") for entry in _entries(folder))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir()) if folder.stat().st_uid == os.getuid() else []
    except OSError:
        return []


def _is_watch(entry: Path) -> bool:
    try:
        return str(entry.readlink()) == _INOTIFY
    except OSError:
        return False


def claim_port(host: str, port: int) -> int:
    """The port to listen on: `port` if it is free, any free one if it is 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            fix = "choose another --port, or --port 0" if is_port else "--host must be an address of this machine"
            raise UserError(f"ampd serve: cannot listen on {host}:{port} ({error.strerror}); {fix}") from None
        claimed: int = probe.getsockname()[1]
    return claimed
