"""Every metric of AMPD: its name, kind, help, labels and buckets. Recorders and displays take them from here.

Names follow Prometheus's conventions: base units, `_total` for counters, `_info` for facts that do not change. Dynamo
adds the labels `dynamo_namespace`, `dynamo_component`, `dynamo_endpoint`, `worker_id`, `model` and `model_name`.
Every label has a fixed, small set of values. No label names a session, a request or a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

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
        labels: name -> its values; an empty tuple: names of policies or values of settings, not known beforehand.
        processes: the processes that expose it.
        buckets: upper bounds of a histogram's buckets, without infinity.
    """

    name: str
    kind: Kind
    help: str
    processes: tuple[Process, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """The name of the metric family in prometheus_client: without the suffix of a counter."""
        return self.name.removesuffix("_total")


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
ROUTE_NAMES = ("local", "remote")
ROLES = ("prefill", "decode")

OTHER = "other"
"""The label value for texts that are not plain words, and for words beyond the bound."""

# -- rounds, as the coordinators serve them

TTFT = Metric(
    "ampd_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Time from a round's arrival at the coordinator to its first token, by prefill (initial: the round bound its "
    "session) and by route.",
    _COORDINATOR,
    {"prefill": PREFILLS, "route": ROUTE_NAMES},
    TTFT_BUCKETS_S,
)
ITL = Metric(
    "ampd_inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Mean time between the output tokens of a round, one observation a round: what the ITL target is compared with.",
    _COORDINATOR,
    buckets=ITL_BUCKETS_S,
)
ROUNDS = Metric(
    "ampd_rounds_total",
    Kind.COUNTER,
    "Rounds that have ended, by outcome against their targets. A round that its client ends after the first token is "
    "judged as far as it came (stop strings end rounds so); failed: ended by an error of whatever kind; abandoned: "
    "ended by its client before its first token and before the TTFT target had passed. Attainment is met / (all but "
    "abandoned).",
    _COORDINATOR,
    {"outcome": OUTCOMES},
)
SLO_TTFT = Metric(
    "ampd_slo_time_to_first_token_seconds",
    Kind.GAUGE,
    "TTFT target of the rounds that bring none of their own.",
    _COORDINATOR,
)
SLO_ITL = Metric(
    "ampd_slo_inter_token_latency_seconds",
    Kind.GAUGE,
    "ITL target of the rounds that bring none of their own.",
    _COORDINATOR,
)
ROUTES = Metric(
    "ampd_routes_total",
    Kind.COUNTER,
    "Rounds that have ended, by the route of their prefill and the policy's reason for it (the last placement counts).",
    _COORDINATOR,
    {"route": ROUTE_NAMES, "reason": ()},
)
ROUND_FAILURES = Metric(
    "ampd_round_failures_total",
    Kind.COUNTER,
    "Requests that ended with an error, by HTTP status; those that never got as far as a worker included.",
    _COORDINATOR,
    {"status": ()},
)
ROUND_RETRIES = Metric(
    "ampd_round_retries_total",
    Kind.COUNTER,
    "Workers that failed a round, which then went on elsewhere or failed.",
    _COORDINATOR,
)
ROUND_DEATHS = Metric(
    "ampd_round_worker_deaths_total",
    Kind.COUNTER,
    "Workers that died while they had a round, once per round. A request under which two died is refused from then on.",
    _COORDINATOR,
)
ROUNDS_IN_PROGRESS = Metric(
    "ampd_rounds_in_progress", Kind.GAUGE, "Rounds that this coordinator serves now.", _COORDINATOR
)
PROMPT_TOKENS = Metric(
    "ampd_prompt_tokens_total",
    Kind.COUNTER,
    "Prompt tokens of the rounds that have ended, by part: history has its KV on the decode worker, the increment is "
    "prefilled.",
    _COORDINATOR,
    {"part": PARTS},
)
OUTPUT_TOKENS = Metric(
    "ampd_output_tokens_total", Kind.COUNTER, "Output tokens of the first choice of each round.", _COORDINATOR
)

# -- sessions

SESSIONS_BOUND = Metric(
    "ampd_sessions_bound_total", Kind.COUNTER, "Sessions that were bound to a decode worker.", _COORDINATOR
)
SESSIONS_REPINNED = Metric(
    "ampd_sessions_repinned_total", Kind.COUNTER, "Sessions that were moved to another decode worker.", _COORDINATOR
)
SESSIONS_LOST = Metric(
    "ampd_sessions_lost_total",
    Kind.COUNTER,
    "Sessions whose KV went before they ended, by reason: worker-lost (told by coordinators), evicted to make room, "
    "idle for longer than the session TTL (told by workers).",
    _BOTH,
    {"reason": LOSSES},
)
SESSIONS_HELD = Metric("ampd_sessions_held", Kind.GAUGE, "Sessions whose KV this worker holds.", _WORKER)

# -- the cluster, as a coordinator sees it

LIVE_WORKERS = Metric(
    "ampd_live_workers",
    Kind.GAUGE,
    "Workers that this coordinator sees alive, by the role that they have now.",
    _COORDINATOR,
    {"role": ROLES},
)
LEASES_EXPIRED = Metric(
    "ampd_worker_leases_expired_total",
    Kind.COUNTER,
    "Workers that fell silent until their lease was over.",
    _COORDINATOR,
)
LEADING = Metric(
    "ampd_leading",
    Kind.GAUGE,
    "1 if this coordinator leads: it assigns the workers' roles. With pools that never change, no coordinator leads.",
    _COORDINATOR,
)
ROLE_ASSIGNMENTS = Metric(
    "ampd_role_assignments_total",
    Kind.COUNTER,
    "Roles that this coordinator assigned, by the new role and the policy's reason.",
    _COORDINATOR,
    {"role": ROLES, "reason": ()},
)
COORDINATOR_INFO = Metric(
    "ampd_coordinator_info",
    Kind.GAUGE,
    "1, with the policies that this coordinator decides by.",
    _COORDINATOR,
    {"routing": (), "binding": (), "pools": ()},
)

# -- shared state

STATE_AVAILABLE = Metric(
    "ampd_state_available", Kind.GAUGE, "1 while the shared state (Redis) answers, 0 while it is lost.", _BOTH
)
STATE_VIEW_AGE = Metric(
    "ampd_state_view_age_seconds",
    Kind.GAUGE,
    "Time since the shared state was last heard: how old this coordinator's view may be. It rises to the timeout of "
    "the state (2 s) in a cluster where nothing happens.",
    _COORDINATOR,
)
STATE_LOSSES = Metric(
    "ampd_state_losses_total", Kind.COUNTER, "Times that this coordinator lost the shared state.", _COORDINATOR
)
STATE_ROUND_TRIPS = Metric(
    "ampd_state_round_trips_total",
    Kind.COUNTER,
    "Round trips to the shared state, by operation.",
    _BOTH,
    {"operation": ()},
)
STATE_ERRORS = Metric(
    "ampd_state_errors_total",
    Kind.COUNTER,
    "Round trips to the shared state that failed, by operation.",
    _BOTH,
    {"operation": ()},
)
STATE_SECONDS = Metric(
    "ampd_state_round_trip_seconds_total",
    Kind.COUNTER,
    "Time spent in round trips to the shared state, by operation.",
    _BOTH,
    {"operation": ()},
)

# -- the prefill queue of a worker

QUEUE_TASKS = Metric("ampd_prefill_queue_tasks", Kind.GAUGE, "Prefills that wait or run on this worker.", _WORKER)
QUEUE_WAIT = Metric(
    "ampd_prefill_queue_predicted_wait_seconds",
    Kind.GAUGE,
    "How long a prefill that came now would wait for all that is queued, by the performance model.",
    _WORKER,
)
PREFILL_WAIT = Metric(
    "ampd_prefill_wait_seconds",
    Kind.HISTOGRAM,
    "Time that prefills waited on this worker before they ran, reads of KV aside.",
    _WORKER,
    buckets=TTFT_BUCKETS_S,
)
PREFILL = Metric(
    "ampd_prefill_seconds",
    Kind.HISTOGRAM,
    "Time from a prefill's start on this worker to its first token.",
    _WORKER,
    buckets=TTFT_BUCKETS_S,
)
POSTPONEMENTS = Metric(
    "ampd_prefill_postponements_total",
    Kind.COUNTER,
    "Times that the ordering ran a later prefill before an earlier one.",
    _WORKER,
)
SLICES = Metric(
    "ampd_prefill_slices_total",
    Kind.COUNTER,
    "Engine calls that prefills were cut into; one that runs whole counts as one.",
    _WORKER,
)

# -- KV

KV_READ_SECONDS = Metric(
    "ampd_kv_read_seconds",
    Kind.HISTOGRAM,
    "Time of a read of KV from another worker, by direction: history (read by a prefill worker) or increment (read by "
    "a decode worker). Failed reads included.",
    _WORKER,
    {"direction": PARTS},
    KV_BUCKETS_S,
)
KV_READ_BYTES = Metric(
    "ampd_kv_read_bytes_total", Kind.COUNTER, "KV read from other workers.", _WORKER, {"direction": PARTS}
)
KV_READ_TOKENS = Metric(
    "ampd_kv_read_tokens_total",
    Kind.COUNTER,
    "Tokens whose KV was read from other workers.",
    _WORKER,
    {"direction": PARTS},
)
KV_READ_FAILURES = Metric(
    "ampd_kv_read_failures_total",
    Kind.COUNTER,
    "Reads of KV that failed or ended short; what is missing is computed again.",
    _WORKER,
    {"direction": PARTS},
)
KV_PINNED = Metric(
    "ampd_kv_pinned_tokens", Kind.GAUGE, "Tokens of sessions whose KV this worker keeps between rounds.", _WORKER
)
KV_USED = Metric("ampd_kv_used_tokens", Kind.GAUGE, "KV memory in use, in tokens.", _WORKER)
KV_CAPACITY = Metric("ampd_kv_capacity_tokens", Kind.GAUGE, "KV memory of this worker, in tokens.", _WORKER)

# -- decode and the worker itself

TOKEN_GAP = Metric(
    "ampd_token_gap_seconds",
    Kind.HISTOGRAM,
    "Time between two outputs of one round on this worker, per token: shows the stalls that a round's mean ITL hides.",
    _WORKER,
    buckets=ITL_BUCKETS_S,
)
DECODE_BATCH = Metric("ampd_decode_batch_rounds", Kind.GAUGE, "Rounds that decode on this worker now.", _WORKER)
DECODE_CONTEXT = Metric(
    "ampd_decode_context_tokens", Kind.GAUGE, "Context of the rounds that decode on this worker now.", _WORKER
)
WORKER_ROUNDS = Metric(
    "ampd_worker_rounds_in_progress",
    Kind.GAUGE,
    "Rounds, or parts of rounds, that are on this worker now, waiting ones included.",
    _WORKER,
)
WORKER_ROLE = Metric(
    "ampd_worker_role",
    Kind.GAUGE,
    "1 for the role that this worker has now, 0 for the other.",
    _WORKER,
    {"role": ROLES},
)
ROLE_CHANGES = Metric(
    "ampd_worker_role_changes_total",
    Kind.COUNTER,
    "Times that this worker took another role, by the new one.",
    _WORKER,
    {"role": ROLES},
)
WORKER_INFO = Metric(
    "ampd_worker_info",
    Kind.GAUGE,
    "1, with the engine, its tensor parallelism and the policies of this worker.",
    _WORKER,
    {"engine": (), "tp": (), "ordering": (), "slicing": ()},
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of this module."""
