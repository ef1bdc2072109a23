"""The processes of a graph with their command lines, environments and ports, computed from the settings."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from ampd.call_signatures import LOOPBACK
from ampd.cli.serve.processes import ProcessSpec, python_module
from ampd.cli.serve.settings import COORDINATOR, FRONTEND, ServeSettings
from ampd.errors import UserError
from ampd.settings import PREFIX, GraphSettings
from ampd.telemetry.metrics.exposition import HOST_VARIABLE, LIVENESS_PATH, OFF, PORT_VARIABLE
from ampd.types import Role
from ampd.wire import METADATA_PREFIX

# -- The largest body of a request that a frontend takes: what the longest context can need, and not more.
#
# A frontend turns a body into tokens before it knows their number. 10 MB of text took it 27 s and 1.4 GB.

BODY_LIMIT_VARIABLE = "DYN_HTTP_BODY_LIMIT_MB"

_BYTES_PER_TOKEN = 16
"""More than text needs (about 4), a token id in JSON (up to 7), or a character as two JSON escapes (12)."""
_MIN_MB = 4
_UNKNOWN_CONTEXT_MB = 45
"""Dynamo's own limit."""


def body_limit_mb(context_tokens: int | None) -> int:
    """In MB; the variable wins if the user has set it. `context_tokens` None: the model does not name its context.

    Raises:
        UserError: the variable is no number of MB.
    """
    if chosen := os.environ.get(BODY_LIMIT_VARIABLE):
        if not (chosen.isascii() and chosen.isdigit() and len(chosen) < 7 and int(chosen)):
            raise UserError(
                f"ampd serve: {BODY_LIMIT_VARIABLE}={chosen[:30]}: give the largest body in MB, as a whole number"
            )
        return int(chosen)
    if context_tokens is None:
        return _UNKNOWN_CONTEXT_MB
    return max(_MIN_MB, -(-context_tokens * _BYTES_PER_TOKEN // 2**20))


# -- metrics of a local graph: a port per process, and a file that lists the ports for Prometheus

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Loopback address for a server that listens on all addresses."""
TARGETS_FILE = "metrics.json"


def system_environment(host: str, port: int | None) -> dict[str, str]:
    """Environment that opens the system port of a process; None: no port, even if our own environment has one."""
    if port is None:
        return {PORT_VARIABLE: str(OFF)}
    return {PORT_VARIABLE: str(port), HOST_VARIABLE: host}


def system_url(host: str, port: int) -> str:
    """The address of a system port for callers on this machine."""
    return f"http://{_address(host)}:{port}"


def live_urls(host: str, specs: Iterable[ProcessSpec], elsewhere: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Name -> address at which a process says that it lives. Processes without a port are left out.

    Coordinators and workers answer there by their event loop, frontends by Dynamo's threads, which do all their work.

    Args:
        host, elsewhere: see `write_targets`.
    """
    urls = {}
    for spec in specs:
        if spec.name in elsewhere:
            urls[spec.name] = f"{system_url(*elsewhere[spec.name])}/live"
        elif (port := int(spec.env.get(PORT_VARIABLE, OFF))) != OFF:
            urls[spec.name] = system_url(host, port) + LIVENESS_PATH
    return urls


def _address(host: str) -> str:
    host = _ANY.get(host, host)
    return f"[{host}]" if ":" in host else host


def write_targets(
    folder: Path, host: str, specs: Iterable[ProcessSpec], elsewhere: Mapping[str, tuple[str, int]]
) -> Path:
    """Write the file for Prometheus's `file_sd_configs`: one target per process, with its name in the label `process`.

    Args:
        host: that the system ports listen on.
        elsewhere: name -> (host, port) of the processes whose metrics are not at the system port.
    """
    places = {spec.name: elsewhere.get(spec.name) or (host, spec.env[PORT_VARIABLE]) for spec in specs}
    targets = [
        {"targets": [f"{_address(where)}:{port}"], "labels": {"process": name}}
        for name, (where, port) in places.items()
    ]
    path = folder / TARGETS_FILE
    path.write_text(json.dumps(targets, indent=1) + "\n", encoding="utf-8")
    return path


# -- a graph's frontend: its command line and its environment, wherever one is started on this machine

_LONGEST_AFFINITY_S = 31_536_000
"""Dynamo takes nothing longer, and nothing shorter than a second."""

FRONTEND_ENVIRONMENT = {
    # /v1/messages, with the line left out that Claude Code puts before its prompt, and that differs in each request.
    "DYN_ENABLE_ANTHROPIC_API": "1",
    "DYN_DISABLE_FRONTEND_ADMIN_API": "1",
    # With session affinity Dynamo publishes the ids of sessions at all addresses, unless a broker does that. Nobody is
    # this broker: each frontend serves without the others' events.
    "DYN_ZMQ_BROKER_URL": "xsub=inproc://none,xpub=inproc://none",
    # Before a firewall or a NAT table forgets them: Dynamo finds out only when a request meets a broken connection.
    "DYN_TCP_HOST_IDLE_TTL_SECS": "60",
    # The seconds for which Dynamo avoids a coordinator with a broken connection: that of a worker which answers its
    # rounds counts as its own, so that the death of a worker would leave the frontend without coordinators.
    "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0",
    # It would write SGLang's logging configuration, which only workers need, to a temporary file that stays.
    "DYN_SKIP_SGLANG_LOG_FORMATTING": "1",
    # A round leaves a worker that is silent for so long: its machine is gone, because workers send signs of life, and
    # a probe ends processes that hang. Dynamo also ends a stream that gives its client nothing for twice as long.
    # Signs of life do not count there: /v1/responses has no event for them, nor has a tool call while it is parsed.
    "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "300",
    # A stream's status waits so long for the first token or an error, so that a refusal has its own status.
    "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "5000",
    # Empty lines in a stream without a token, so that nothing on the way takes a long prefill for a dead connection.
    "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": "10000",
}
"""Of every frontend, also of those in `k8s/base/graph.yaml`."""


@dataclass(frozen=True, slots=True)
class Frontend:
    """What a frontend must know.

    Attributes:
        host, port: where clients find it.
        namespace: of the graph.
        session_ttl_s: for how long a session stays at one of several coordinators; None: there is only one.
        body_limit_mb: largest body of a request that it takes; None: as large as Dynamo allows.
        status_relay: whether the relay stands before it, as it should.
        session_names: further names of sessions that the relay reads.
        aliases: patterns of model names, with the name that they stand for: `claude-*=tiny`. The relay reads them.
    """

    host: str
    port: int
    namespace: str
    session_ttl_s: float | None = None
    body_limit_mb: int | None = None
    status_relay: bool = True
    session_names: str = ""
    aliases: tuple[str, ...] = ()

    def process(self, name: str, environment: Mapping[str, str]) -> ProcessSpec:
        """The process to start. It inherits none of our variables, because some are secret.

        Args:
            environment: what all processes of the graph get.
        """
        limit = {} if self.body_limit_mb is None else {BODY_LIMIT_VARIABLE: str(self.body_limit_mb)}
        variables = {**FRONTEND_ENVIRONMENT, **limit, **environment}
        return ProcessSpec(name, self._argv(), variables, hides=PREFIX)

    def _argv(self) -> tuple[str, ...]:
        flags = ["--http-host", self.host, "--http-port", str(self.port), "--router-mode", "round-robin"]
        # A round whose worker or coordinator is lost is sent again, so that it goes on at another one: not for ever, so
        # that no request ends all of them.
        flags += ["--namespace", self.namespace, "--migration-limit", "3"]
        if self.session_ttl_s is not None:
            # A replica remembers its sessions' contexts. Any replica can serve any round; affinity saves a KV query.
            # Soft: the sessions of a dead coordinator go on at another one.
            ttl_s = min(max(1, round(self.session_ttl_s)), _LONGEST_AFFINITY_S)
            flags += ["--router-session-affinity-ttl-secs", str(ttl_s)]
            flags += ["--router-session-affinity-mode", "soft"]
        if not self.status_relay:
            return python_module("dynamo.frontend", flags)
        if self.session_names:
            flags += ["--session-names", self.session_names]
        return python_module("router.status_relay", [*flags, *(f"--model-alias={each}" for each in self.aliases)])


# -- the processes of a graph with their command lines and environments, computed from the settings


@dataclass(frozen=True, slots=True)
class GraphSite:
    """Facts about this machine that the command lines need.

    Attributes:
        model_path: the model folder.
        model_names: for clients. Of the first one the others are further names, or patterns of names.
        state_url: the Redis that answers.
        port: the frontend's port.
        discovery_dir: folder of Dynamo's file discovery.
        worker_env: device environment per worker, prefill workers first.
        body_limit_mb: largest body of a request that the frontend takes.
        system_ports: for the metrics of workers and coordinators, in this order; empty: no metrics.
    """

    model_path: Path
    model_names: tuple[str, ...]
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
    flags = ["--model", str(site.model_path)]
    flags += [part for name in site.model_names if "*" not in name for part in ("--model-name", name)]
    flags += ["--routing", settings.routing, "--binding", settings.binding, "--pools", settings.pools]
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
        session_names=settings.session_names,
        aliases=tuple(f"{name}={site.model_names[0]}" for name in site.model_names if "*" in name),
    )
