"""The processes of a graph with their command lines and environments, computed from the settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from ampd.call_signatures import LOOPBACK
from ampd.cli.serve.frontend import Frontend
from ampd.cli.serve.metrics import system_environment
from ampd.cli.serve.processes import ProcessSpec, python_module
from ampd.cli.serve.settings import ServeSettings
from ampd.graph_settings import GraphSettings
from ampd.settings import PREFIX
from ampd.types import Role
from ampd.wire import METADATA_PREFIX

FRONTEND = "frontend"
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class GraphSite:
    """Facts about this machine that the command lines need.

    Attributes:
        model_path: the model folder.
        state_url: the Redis that answers.
        port: the frontend's port.
        discovery_dir: folder of Dynamo's file discovery.
        worker_env: device environment per worker, prefill workers first.
        body_limit_mb: largest body of a request that the frontend takes.
        system_ports: for the metrics of workers and coordinators, in this order; empty: no metrics.
    """

    model_path: Path
    model_name: str
    state_url: str
    port: int
    discovery_dir: Path
    worker_env: tuple[Mapping[str, str], ...]
    body_limit_mb: int
    system_ports: tuple[int, ...] = ()


def graph_processes(settings: ServeSettings, site: GraphSite) -> list[ProcessSpec]:
    """Workers, coordinators and frontend, in the order in which to start them."""
    base = dynamo_environment(site.discovery_dir)
    ports = chain(site.system_ports, repeat(None))

    def environment() -> dict[str, str]:
        return {**base, **system_environment(settings.metrics_host, next(ports))}

    # Not as a flag, because every user of the machine can read command lines, and the URL may have a password.
    state = {f"{PREFIX}STATE_URL": site.state_url}

    specs = [
        ProcessSpec(
            f"{role}-{index}", _worker_argv(settings, site, role), {**environment(), **state, **site.worker_env[index]}
        )
        for index, role in enumerate(settings.worker_roles())
    ]
    specs += [
        ProcessSpec(f"{COORDINATOR}-{index}", _coordinator_argv(settings, site), {**environment(), **state})
        for index in range(settings.coordinators)
    ]
    return [*specs, _frontend(settings, site).process(FRONTEND, environment())]


def dynamo_environment(discovery_dir: Path) -> dict[str, str]:
    """Dynamo on one machine: discovery through files, requests over TCP on loopback, no etcd and no NATS."""
    return {
        **LOOPBACK,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(discovery_dir),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_METADATA_HEADER": METADATA_PREFIX,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _shared_flags(settings: ServeSettings) -> list[str]:
    flags: list[str] = []
    for name in (name for name in GraphSettings.model_fields if name != "state_url"):
        value = getattr(settings, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return flags


def _worker_argv(settings: ServeSettings, site: GraphSite, role: Role) -> tuple[str, ...]:
    flags = ["--role", role, "--engine", settings.engine, "--model", str(site.model_path)]
    flags += ["--tp", str(settings.degree(role))]
    flags += ["--ordering", settings.ordering, "--slicing", settings.slicing]
    flags += ["--stream-tokens", str(settings.stream_tokens)]
    flags += ["--replies", str(settings.replies.resolve())] if settings.replies else []
    return python_module("workers", [*flags, *_shared_flags(settings), *shlex.split(settings.worker_args)])


def _coordinator_argv(settings: ServeSettings, site: GraphSite) -> tuple[str, ...]:
    flags = ["--model", str(site.model_path), "--model-name", site.model_name]
    flags += ["--routing", settings.routing, "--binding", settings.binding, "--pools", settings.pools]
    # For the pools policy, which may serve the recent load again as the workers would.
    flags += ["--ordering", settings.ordering, "--slicing", settings.slicing]
    for flag, value in (
        ("--dyn-tool-call-parser", settings.dyn_tool_call_parser),
        ("--dyn-reasoning-parser", settings.dyn_reasoning_parser),
    ):
        flags += [flag, value] if value else []
    return python_module("router", [*flags, *_shared_flags(settings), *shlex.split(settings.router_args)])


def _frontend(settings: ServeSettings, site: GraphSite) -> Frontend:
    return Frontend(
        settings.host,
        site.port,
        settings.namespace,
        session_ttl_s=settings.session_ttl_s if settings.coordinators > 1 else None,
        body_limit_mb=site.body_limit_mb,
        status_relay=settings.status_relay,
    )
