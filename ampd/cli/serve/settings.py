"""Settings of `ampd serve`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ampd.graph_settings import GraphSettings
from ampd.handler_stream import MOST_JOINED_TOKENS
from ampd.perf.presets import profile_names
from ampd.policies import defaults, registry
from ampd.types import Role
from router.settings import PARSER_NAMES

EMBEDDED = "embedded"
TINY = "tiny"


class EngineName(StrEnum):
    """The engines that a worker can run."""

    SGLANG = "sglang"
    MODELLED = "modelled"


class ServeSettings(GraphSettings):
    """Start the whole graph on this machine: Redis, Dynamo frontend, coordinators and workers. Ctrl-C stops it."""

    known_names: ClassVar = {**registry.NAMES, **PARSER_NAMES, "perf": profile_names}

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
    model_name: str | None = Field(None, description="Name that clients use; default: the model folder's name.")
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
    pools: str = Field(defaults.POOLS, description="Policy that changes the workers' roles while they serve.")
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
    start_timeout_s: float = Field(300.0, gt=0, description="Seconds that the graph may take to become ready.")

    def workers(self) -> dict[Role, int]:
        """Number of workers by role, prefill workers first. Roles without workers are left out."""
        default = 0 if self.mixed else 1
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        counts = {role: default if count is None else count for role, count in named.items()}
        return {role: count for role, count in counts.items() if count}

    def worker_roles(self) -> list[Role]:
        """The role of each worker, in the order of `workers`."""
        return [role for role, count in self.workers().items() for _ in range(count)]

    def degree(self, role: Role) -> int:
        """Tensor-parallel degree of the workers of a role."""
        named = {Role.PREFILL: self.prefill_tp, Role.DECODE: self.decode_tp, Role.MIXED: self.mixed_tp}
        return named[role] or self.tp
