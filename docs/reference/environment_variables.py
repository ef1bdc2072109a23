"""Environment variables that are no flags of ours: whose they are, and what they are for here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """One or several variables that belong together.

    Attributes:
        owner: the software that reads it.
        text: what it is for, and who sets it.
        source: the address where its owner says so.
    """

    names: tuple[str, ...]
    owner: str
    text: str
    source: str


_DYNAMO = "https://github.com/ai-dynamo/dynamo/blob/main/lib/runtime/src/config/environment_names.rs"
_DYNAMO_RUNTIME = "https://docs.nvidia.com/dynamo/v1.6.0/reference/components/runtime-configuration"
_DYNAMO_LOGS = "https://docs.nvidia.com/dynamo/v1.5.0/reference/observability/environment-variables.md"
_SGLANG = "https://docs.sglang.io/references/environment_variables.html"
_NIXL = "https://docs.nvidia.com/nixl/user-guide/backend-selection/ucx"

ENVIRONMENT: tuple[Variable, ...] = (
    Variable(
        ("AMPD_POLICY_MODULES",),
        "AMPD",
        "Modules with policies of your own, comma-separated. Every process of a graph and the simulator import them.",
        "own-policy.md",
    ),
    Variable(
        ("AMPD_SGLANG_ENGINE",),
        "AMPD",
        "A worker sets it for the processes of its own engine. Without it our SGLang plugin changes nothing.",
        "../workers/engines/sglang_plugin.py",
    ),
    Variable(
        ("AMPD_REDIS_PASSWORD", "AMPD_REDIS_URL"),
        "manifests",
        "From the Secret `ampd-redis`; the manifests put them into `AMPD_STATE_URL`. No process reads them.",
        "../k8s/README.md",
    ),
    Variable(
        ("DYN_DISCOVERY_BACKEND",),
        "Dynamo",
        "How processes find each other: `file` (`ampd serve`), `kubernetes` (manifests), `etcd` (Dynamo's default).",
        _DYNAMO_RUNTIME,
    ),
    Variable(("DYN_FILE_KV",), "Dynamo", "Folder of the discovery `file`.", _DYNAMO_RUNTIME),
    Variable(
        ("DYN_REQUEST_PLANE",),
        "Dynamo",
        "`tcp`: how requests travel.",
        _DYNAMO_RUNTIME,
    ),
    Variable(
        ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"),
        "Dynamo",
        "Address for requests and interface for answers of a process; by default the machine's outer ones, with "
        "`ampd serve` `127.0.0.1` and `lo`. A member without `--graph-secret-file` refuses anything outside.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_TCP_REQUEST_TIMEOUT",),
        "Dynamo",
        "Seconds in which a process must acknowledge a request: 5 by default, 60 in coordinators.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_EVENT_PLANE",),
        "Dynamo",
        "`zmq`: how Dynamo's events travel. AMPD sends none.",
        _DYNAMO_RUNTIME,
    ),
    Variable(
        ("DYN_ZMQ_BROKER_URL",),
        "Dynamo",
        "Nobody, for frontends: otherwise they would publish the ids of sessions at all addresses.",
        _DYNAMO_RUNTIME,
    ),
    Variable(
        ("DYN_SYSTEM_PORT", "DYN_SYSTEM_HOST"),
        "Dynamo",
        "Where coordinators and workers answer `/live`, `/engine/live`, `/health` and `/metrics`: port 9090 in the "
        "manifests, at most 32767; `-1`, the default, opens none.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS",),
        "Dynamo",
        "Coordinators and workers set it to `[]`.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_NAMESPACE_PREFIX",),
        "Dynamo",
        "Namespaces whose models the frontend serves; in the manifests the graph's own.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_HTTP_BODY_LIMIT_MB",),
        "Dynamo",
        "Largest body of a request, in MB; larger ones get 413. 4 in the manifests; `ampd serve` computes it from the "
        "model's context.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_HTTP_SVC_HEALTH_PATH",),
        "Dynamo",
        "Path of the frontend's health, `/health` by default.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_HTTP_HOST", "DYN_HTTP_PORT"),
        "Dynamo",
        "Where the frontend, or the status relay in its place, listens.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_TLS_CERT_PATH", "DYN_TLS_KEY_PATH"),
        "Dynamo",
        "TLS of the frontend. The status relay does not start with it.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_ENABLE_ANTHROPIC_API",),
        "Dynamo",
        "`1`: serves `/v1/messages`.",
        "clients.md#anthropics-api",
    ),
    Variable(
        ("DYN_METADATA_HEADER",),
        "Dynamo",
        "`x-session-`: prefix of the headers that Dynamo passes on, so that `X-Session-Affinity` names a session.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_RUNTIME_INHIBITED_DURATION_SECS",),
        "Dynamo",
        "`0`: seconds for which a frontend avoids a coordinator after a broken connection, also of a worker.",
        "reliability.md#bounds",
    ),
    Variable(
        ("DYN_TCP_HOST_IDLE_TTL_SECS",),
        "Dynamo",
        "`60`: a frontend closes connections that were idle so many seconds.",
        "reliability.md#bounds",
    ),
    Variable(
        ("DYN_DISABLE_FRONTEND_ADMIN_API",),
        "Dynamo",
        "`1`: the frontend has no `/busy_threshold`.",
        "https://github.com/ai-dynamo/dynamo/blob/main/SECURITY.md",
    ),
    Variable(
        ("DYN_SKIP_SGLANG_LOG_FORMATTING",),
        "Dynamo",
        "`1`: the frontend writes no temporary file with SGLang's logging configuration.",
        _DYNAMO_LOGS,
    ),
    Variable(
        ("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS",),
        "Dynamo",
        "`5000`: for so many milliseconds a stream's status waits for the first token or an error.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",),
        "Dynamo",
        "`300`: a frontend leaves a stream that is silent for so many seconds, and sends its round again.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS",),
        "Dynamo",
        "`10000`: a stream without a token gets a comment (`:`) every so many milliseconds.",
        _DYNAMO,
    ),
    Variable(
        ("SGLANG_LOGGING_CONFIG_PATH",),
        "SGLang",
        "The logging configuration of the engine, set by workers.",
        _DYNAMO_LOGS,
    ),
    Variable(
        ("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",),
        "Dynamo",
        "Seconds that the frontend waits for its requests after SIGTERM; set in the manifests.",
        _DYNAMO,
    ),
    Variable(
        ("DYN_LOG",),
        "Dynamo",
        "Log level, also by target: `info,router=debug,workers=debug`. Our loggers obey it too.",
        _DYNAMO_LOGS,
    ),
    Variable(
        ("DYN_LOGGING_JSONL",),
        "Dynamo",
        "`1`: one JSON object per line, with trace ids; set in the manifests.",
        _DYNAMO_LOGS,
    ),
    Variable(
        ("OTEL_EXPORT_ENABLED",),
        "Dynamo",
        "`1` sends logs and traces to an OpenTelemetry collector (`OTEL_EXPORTER_OTLP_ENDPOINT`).",
        _DYNAMO_LOGS,
    ),
    Variable(
        ("UCX_TLS", "UCX_NET_DEVICES", "UCX_RNDV_SCHEME"),
        "UCX",
        "Transports and devices for KV, and the protocol for large pieces; UCX chooses the unset ones. "
        "`k8s/components/rdma` sets the first and the last. `ampd serve`, and members without "
        "`--graph-secret-file`, set the devices to `lo`.",
        _NIXL,
    ),
    Variable(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        "Gloo, NCCL",
        "Interface on which the ranks of an engine meet; `lo` as `UCX_NET_DEVICES`.",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
    Variable(
        ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"),
        "UCX, NIXL",
        "Log level of the transport. SGLang workers set `error` and `WARN` by default.",
        _NIXL,
    ),
    Variable(
        ("SGLANG_SANITIZE_NAN_LOGITS",),
        "SGLang",
        "`1` in workers: infinite or NaN logits are replaced by finite ones, which otherwise end the engine.",
        _SGLANG,
    ),
    Variable(
        ("SGLANG_PLUGINS",),
        "SGLang",
        "Plugins that are loaded; default: all. Without `ampd` among them a worker ends at its start.",
        _SGLANG,
    ),
    Variable(
        ("CUDA_VISIBLE_DEVICES",),
        "CUDA",
        "`ampd serve` divides these GPUs among its workers. A worker on the CPU hides them.",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
    ),
    Variable(
        ("OMP_NUM_THREADS",),
        "OpenMP",
        "`ampd serve` divides the cores among workers without GPU.",
        "https://www.openmp.org/spec-html/5.0/openmpse50.html",
    ),
    Variable(
        ("HF_HUB_OFFLINE", "HF_TOKEN"),
        "Hugging Face",
        "The first is `1` in every process, because models are folders. The second is for the job of `k8s/models`, "
        "which downloads a model.",
        "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
    ),
    Variable(
        ("XDG_CACHE_HOME", "HOME"),
        "XDG",
        "Folder of the tiny model, and of the curves of `benchmarks/policies`: `$XDG_CACHE_HOME/ampd`, else "
        "`~/.cache/ampd`.",
        "https://specifications.freedesktop.org/basedir-spec/latest/",
    ),
)
"""In the order of the reference."""
