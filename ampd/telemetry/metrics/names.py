"""Every metric of AMPD: its name, kind, help, labels and buckets. Recorders and displays take them from here.

Names follow Prometheus's conventions: base units, `_total` for counters, `_info` for facts that do not change. Dynamo
adds the labels `dynamo_namespace`, `dynamo_component`, `dynamo_endpoint`, `worker_id`, `model` and `model_name`.
Every label has a fixed, small set of values. No label names a session, a request or a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from ampd.perf.corrections import KINDS
from ampd.serving.kv_tiers import TIERS
from ampd.serving.moves import REASONS

PREFIX = "ampd_"


class Kind(StrEnum):
    """What Prometheus may do with a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(StrEnum):
    """The processes that have metrics of ours; Dynamo's frontend has its own at its HTTP port."""

    COORDINATOR = "coordinator"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        processes: the processes that expose it.
        labels: name -> its values; an empty tuple: names of policies or values of settings, not known beforehand.
        buckets: upper bounds of a histogram's buckets, without infinity.
    """

    kind: Kind
    name: str
    processes: tuple[Process, ...]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """The name of the metric family in prometheus_client: without the suffix of a counter."""
        return self.name.removesuffix("_total")


_counter, _gauge, _histogram = (partial(Metric, kind) for kind in (Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM))

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
"""TTFTs, and the parts of a TTFT: queue, prefill."""

ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0),
)

KV_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_COORDINATOR = (Process.COORDINATOR,)
_WORKER = (Process.WORKER,)
_BOTH = (Process.COORDINATOR, Process.WORKER)

MET, MISSED_TTFT, MISSED_ITL, MISSED_BOTH = "met", "missed-ttft", "missed-itl", "missed-both"
FAILED, ABANDONED = "failed", "abandoned"
OUTCOMES = (MET, MISSED_TTFT, MISSED_ITL, MISSED_BOTH, FAILED, ABANDONED)
PREFILLS = INITIAL, INCREMENTAL = ("initial", "incremental")
PARTS = HISTORY, INCREMENT = ("history", "increment")
"""Of a prompt; also the directions of KV: the history goes to a prefill worker, the increment comes back."""
LOSSES = WORKER_LOST, EVICTED, IDLE = ("worker-lost", "evicted", "idle")
EVICTION_CAUSES = ("unused", "surplus", "idle")
REFUSALS = ("missing", "wrong", "old", "repeated")
ROUTE_NAMES = ("local", "remote")
ROLES = ("prefill", "decode", "mixed")
MOVES = REASONS

ADMITTED = "admitted"
SESSIONS = NEW_SESSION, RUNNING_SESSION = ("new", "running")
ADMISSION_REFUSALS = ("wait", "decode-batch", "rounds")
"""The values of `ampd.serving.admission.RefusalReason`."""
DROPS = PATIENCE, QUEUE_FULL = ("patience", "queue-full")

OTHER = "other"
"""The label value for texts that are not plain words, and for words beyond the bound."""

# -- rounds, as the coordinators serve them

TTFT = _histogram(
    "ampd_time_to_first_token_seconds",
    _COORDINATOR,
    "Time from a round's arrival at the coordinator to its first token. Initial: the round bound its session.",
    {"prefill": PREFILLS, "route": ROUTE_NAMES},
    TTFT_BUCKETS_S,
)
ITL = _histogram(
    "ampd_inter_token_latency_seconds",
    _COORDINATOR,
    "Mean time between the output tokens of a round, one observation per round.",
    buckets=ITL_BUCKETS_S,
)
ROUNDS = _counter(
    "ampd_rounds_total",
    _COORDINATOR,
    "Rounds that have ended, by outcome against their targets. A round that its client ends after the first token is "
    "judged as far as it came. Failed: ended by an error. Abandoned: ended by its client before its first token and "
    "before the TTFT target had passed.",
    {"outcome": OUTCOMES},
)
SLO_TTFT = _gauge(
    "ampd_slo_time_to_first_token_seconds", _COORDINATOR, "TTFT target of the rounds that bring none of their own."
)
SLO_ITL = _gauge(
    "ampd_slo_inter_token_latency_seconds", _COORDINATOR, "ITL target of the rounds that bring none of their own."
)
ROUTES = _counter(
    "ampd_routes_total",
    _COORDINATOR,
    "Rounds that have ended, by the route and the reason of their last placement.",
    {"route": ROUTE_NAMES, "reason": ()},
)
ROUND_FAILURES = _counter(
    "ampd_round_failures_total",
    _COORDINATOR,
    "Requests that ended with an error, by HTTP status.",
    {"status": ()},
)
ADMISSIONS = _counter(
    "ampd_admissions_total",
    _COORDINATOR,
    "Rounds that asked for admission, by session (new: its first round) and by decision: admitted, or the reason of a "
    "refusal with 429 (wait: the queues, decode-batch, rounds: in progress at this coordinator).",
    {"session": SESSIONS, "decision": (ADMITTED, *ADMISSION_REFUSALS)},
)
ROUND_RETRIES = _counter(
    "ampd_round_retries_total", _COORDINATOR, "Workers that failed a round, which then went on elsewhere or failed."
)
ROUND_DEATHS = _counter(
    "ampd_round_worker_deaths_total",
    _COORDINATOR,
    "Workers that died while they had a round, once per round. A request under which two died is refused for a while.",
)
ROUNDS_IN_PROGRESS = _gauge("ampd_rounds_in_progress", _COORDINATOR, "Rounds that this coordinator serves now.")
HANDING_ON = _gauge(
    "ampd_rounds_handed_on",
    _COORDINATOR,
    "Whether workers answer the frontends themselves. 0: all tokens pass this coordinator; its log says why.",
)
PROMPT_TOKENS = _counter(
    "ampd_prompt_tokens_total",
    _COORDINATOR,
    "Prompt tokens of the rounds that have ended, by part.",
    {"part": PARTS},
)
OUTPUT_TOKENS = _counter("ampd_output_tokens_total", _COORDINATOR, "Output tokens of the first choice of each round.")

# -- sessions

SESSIONS_BOUND = _counter("ampd_sessions_bound_total", _COORDINATOR, "Sessions that were bound to a decode worker.")
ROUNDS_UNNAMED = _counter(
    "ampd_rounds_without_session_total",
    _COORDINATOR,
    "Rounds whose client named no session, and whose prompt continued no earlier one.",
)
PREFIX_BREAKS = _histogram(
    "ampd_prefix_break_tokens",
    _COORDINATOR,
    "Rounds that continue no context of their session: where the prompt departs from the nearest one, in tokens.",
    buckets=(64, 256, 1024, 4096, 16384, 65536),
)
SESSIONS_BREAKING = _gauge(
    "ampd_sessions_prefix_breaking",
    _COORDINATOR,
    "Sessions whose prefix breaks in every round: the last three or more, one of them in the last minute.",
)
SESSIONS_REPINNED = _counter(
    "ampd_sessions_repinned_total", _COORDINATOR, "Sessions that were moved because their decode worker was lost."
)
SESSION_MOVES = _counter(
    "ampd_session_moves_total",
    _COORDINATOR,
    "Sessions that moved to another worker between two rounds, by reason: role (the owner no longer owns sessions), "
    "itl (its decode batch is too slow), ttft (the round would be late), memory (its KV memory is full).",
    {"reason": MOVES},
)
SESSIONS_LOST = _counter(
    "ampd_sessions_lost_total",
    _BOTH,
    "Sessions whose KV went before they ended, by reason: worker-lost (told by coordinators), evicted to make room, "
    "idle for longer than the session TTL (told by workers).",
    {"reason": LOSSES},
)
SESSIONS_HELD = _gauge("ampd_sessions_held", _WORKER, "Sessions whose KV this worker holds.")

# -- the cluster, as a coordinator sees it

LIVE_WORKERS = _gauge(
    "ampd_live_workers",
    _COORDINATOR,
    "Workers that this coordinator sees alive, by the role that they have now.",
    {"role": ROLES},
)
LEASES_EXPIRED = _counter(
    "ampd_worker_leases_expired_total", _COORDINATOR, "Workers that fell silent until their lease was over."
)
LEADING = _gauge(
    "ampd_leading",
    _COORDINATOR,
    "1 if this coordinator assigns the workers' roles. With static pools no coordinator leads.",
)
ROLE_ASSIGNMENTS = _counter(
    "ampd_role_assignments_total",
    _COORDINATOR,
    "Roles that this coordinator assigned, by the new role and the policy's reason.",
    {"role": ROLES, "reason": ()},
)
COORDINATOR_INFO = _gauge(
    "ampd_coordinator_info",
    _COORDINATOR,
    "1, with the policies that this coordinator decides by.",
    {"routing": (), "binding": (), "pools": ()},
)

# -- shared state

STATE_AVAILABLE = _gauge("ampd_state_available", _BOTH, "1 while the shared state (Redis) answers, 0 while it is lost.")
STATE_VIEW_AGE = _gauge(
    "ampd_state_view_age_seconds",
    _COORDINATOR,
    "Time since the shared state was last heard. It rises to 2 s in a cluster where nothing happens.",
)
STATE_LOSSES = _counter("ampd_state_losses_total", _COORDINATOR, "Times that this coordinator lost the shared state.")
STATE_ROUND_TRIPS = _counter(
    "ampd_state_round_trips_total", _BOTH, "Round trips to the shared state, by operation.", {"operation": ()}
)
STATE_ERRORS = _counter(
    "ampd_state_errors_total", _BOTH, "Round trips to the shared state that failed, by operation.", {"operation": ()}
)
STATE_SECONDS = _counter(
    "ampd_state_round_trip_seconds_total",
    _BOTH,
    "Time spent in round trips to the shared state, by operation.",
    {"operation": ()},
)

# -- the prefill queue of a worker

QUEUE_TASKS = _gauge("ampd_prefill_queue_tasks", _WORKER, "Prefills that wait or run on this worker.")
QUEUE_WAIT = _gauge(
    "ampd_prefill_queue_predicted_wait_seconds",
    _WORKER,
    "How long a prefill that came now would wait for all that is queued, by the performance model.",
)
PREFILL_WAIT = _histogram(
    "ampd_prefill_wait_seconds",
    _WORKER,
    "Time that prefills waited on this worker before they ran, reads of KV aside.",
    buckets=TTFT_BUCKETS_S,
)
PREFILL = _histogram(
    "ampd_prefill_seconds",
    _WORKER,
    "Time from a prefill's start on this worker to its first token.",
    buckets=TTFT_BUCKETS_S,
)
PREFILLS_DROPPED = _counter(
    "ampd_prefills_dropped_total",
    _WORKER,
    "Prefills that this worker refused with 429, by reason: patience (they waited far longer than their target), "
    "queue-full.",
    {"reason": DROPS},
)
POSTPONEMENTS = _counter(
    "ampd_prefill_postponements_total", _WORKER, "Times that the ordering ran a later prefill before an earlier one."
)

# -- KV

KV_READ_SECONDS = _histogram(
    "ampd_kv_read_seconds",
    _WORKER,
    "Time of a read of KV from another worker, also of a failed one, by direction: history (read by a prefill worker) "
    "or increment (read by a decode worker).",
    {"direction": PARTS},
    KV_BUCKETS_S,
)
KV_READ_BYTES = _counter("ampd_kv_read_bytes_total", _WORKER, "KV read from other workers.", {"direction": PARTS})
KV_READ_TOKENS = _counter(
    "ampd_kv_read_tokens_total", _WORKER, "Tokens whose KV was read from other workers.", {"direction": PARTS}
)
KV_READ_FAILURES = _counter(
    "ampd_kv_read_failures_total",
    _WORKER,
    "Reads of KV that failed or ended short; what is missing is computed again.",
    {"direction": PARTS},
)
KV_HITS = _counter(
    "ampd_kv_hit_tokens_total",
    _WORKER,
    "Prompt tokens whose KV was there, by tier: device, store (of this worker) or peer (read for this round). "
    "recomputed: tokens of a history whose KV was in none of them.",
    {"tier": TIERS},
)
KV_RELOAD_SECONDS = _histogram(
    "ampd_kv_reload_seconds",
    _WORKER,
    "Time of a copy of KV from the store to the device, one observation per round that needed one.",
    buckets=KV_BUCKETS_S,
)
# The name is older than the KV store. It stays because dashboards use it.
KV_PINNED = _gauge(
    "ampd_kv_pinned_tokens", _WORKER, "Tokens of sessions whose KV this worker holds between rounds, in its KV store."
)
KV_USED = _gauge("ampd_kv_used_tokens", _WORKER, "KV memory of the device that rounds use, in tokens.")
KV_CAPACITY = _gauge("ampd_kv_capacity_tokens", _WORKER, "KV memory of this worker's device, in tokens.")
STORE_USED_BYTES = _gauge(
    "ampd_kv_store_used_bytes",
    _WORKER,
    "Bytes of all KV in the store.",
)
STORE_CAPACITY_BYTES = _gauge("ampd_kv_store_capacity_bytes", _WORKER, "Size of this worker's KV store.")
STORE_USED = _gauge("ampd_kv_store_used_tokens", _WORKER, "Tokens of all KV in the store.")
STORE_CAPACITY = _gauge("ampd_kv_store_capacity_tokens", _WORKER, "Size of this worker's KV store, in tokens.")
STORE_EVICTED = _counter(
    "ampd_kv_store_evicted_tokens_total",
    _WORKER,
    "Tokens whose KV the store dropped, by cause: unused (of no session), surplus (the next round can compute them "
    "again within its target), or idle (of a session between two rounds).",
    {"cause": EVICTION_CAUSES},
)

# -- decode and the worker itself

TOKEN_GAP = _histogram(
    "ampd_token_gap_seconds",
    _WORKER,
    "Time between two outputs of one round on this worker, per token.",
    buckets=ITL_BUCKETS_S,
)
DECODE_BATCH = _gauge("ampd_decode_batch_rounds", _WORKER, "Rounds that decode on this worker now.")
DECODE_CONTEXT = _gauge("ampd_decode_context_tokens", _WORKER, "Context of the rounds that decode on this worker now.")
WORKER_ROUNDS = _gauge(
    "ampd_worker_rounds_in_progress",
    _WORKER,
    "Rounds, or parts of rounds, that are on this worker now, waiting ones included.",
)
CALLS_REFUSED = _counter(
    "ampd_worker_calls_refused_total",
    _WORKER,
    "Calls that this worker refused because of their signature (--graph-secret-file), by reason: missing, wrong, old "
    "(or the clocks differ), repeated.",
    {"reason": REFUSALS},
)
WORKER_ROLE = _gauge(
    "ampd_worker_role", _WORKER, "1 for the role that this worker has now, 0 for the others.", {"role": ROLES}
)
ROLE_CHANGES = _counter(
    "ampd_worker_role_changes_total",
    _WORKER,
    "Times that this worker took another role, by the new one.",
    {"role": ROLES},
)
WORKER_INFO = _gauge(
    "ampd_worker_info",
    _WORKER,
    "1, with the engine, its tensor parallelism and the policies of this worker.",
    {"engine": (), "tp": (), "ordering": (), "slicing": ()},
)
TIME_FACTOR = _gauge(
    "ampd_time_factor",
    _WORKER,
    "How many times as long this worker takes as the performance model says, by kind of work: passes that prefill, "
    "decode steps, passes that are both, reads of KV from other workers, loads of KV from the store. Decisions count "
    "on it.",
    {"kind": KINDS},
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of this module."""
