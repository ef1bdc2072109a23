"""The decision record of a round: the decision, its estimates, and the measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ampd.types import RouteDecision
from ampd.wire import RoundReport


@dataclass(slots=True)
class DecisionRecord:
    """Returned to clients that ask for `nvext.extra_fields: ["engine_data"]`, as `nvext.engine_data.ampd`.

    Attributes:
        session_id: the client's name of the session, or a fresh one; `session_key`: its name inside of the graph.
        request_id, trace_id: the ids of the round in the logs of all processes; None: Dynamo carries no traces.
        route, reason, policy: where the increment was prefilled, and which rule of which policy decided it.
        move_reason: why the session moved to another decode worker before this round; "": it did not.
        hist_tokens, incr_tokens: how the decision split the prompt.
        kept_tokens: of the prompt, in the context of its session before, as far as is known. Their KV may be gone.
        shared_tokens: of the prompt's beginning that the prefilling worker was known to hold for other sessions.
        estimates: the routes that were compared.
        queued_s, prefill_s: of the prefill, as measured by the worker that ran it.
        ttft_s: from the request's arrival at the coordinator to the first token's departure; None: none has left yet.
        kv_read_*_history: KV that the prefill worker read from the decode worker; `_increment`: the other way.
        cached_tokens: prompt tokens that the prefill did not compute.
        hit_tokens: where their KV was when the prefill began: `device`, `store`, `peer`; `recomputed`: tokens of the
            history whose KV was in none of them, those included that had been evicted before.
        kv_reload_s: time of copies from KV stores to devices, of both workers, as far as their engines measure it.
        slices: parts in which the prefill ran, with the work of others between them.
        ttft_target_s, itl_target_s: the round's targets.
        clamped_targets: `ttft_target`, `itl_target`: the client set it outside of the graph's limits.
        rewritten: the prompt departs from the session's last context.
        retries: workers that failed this round.
    """

    session_id: str
    policy: str
    session_key: str = ""
    request_id: str = ""
    trace_id: str | None = None
    route: str = ""
    reason: str = ""
    decode_worker: str = ""
    prefill_worker: str | None = None
    epoch: int = 0
    move_reason: str = ""
    hist_tokens: int = 0
    incr_tokens: int = 0
    kept_tokens: int = 0
    shared_tokens: int = 0
    estimates: list[dict[str, Any]] = field(default_factory=list)
    queued_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float | None = None
    kv_read_tokens_history: int = 0
    kv_read_bytes_history: int = 0
    kv_read_s_history: float = 0.0
    kv_read_tokens_increment: int = 0
    kv_read_bytes_increment: int = 0
    kv_read_s_increment: float = 0.0
    cached_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    kv_reload_s: float = 0.0
    slices: int = 1
    ttft_target_s: float = 0.0
    itl_target_s: float = 0.0
    clamped_targets: tuple[str, ...] = ()
    rewritten: bool = False
    retries: int = 0

    def decided(
        self, decision: RouteDecision, decode_worker: str, epoch: int, hist_tokens: int, incr_tokens: int
    ) -> None:
        """A placement; a later one of the same round replaces it."""
        self.route, self.reason = str(decision.route), decision.reason
        self.decode_worker, self.epoch = decode_worker, epoch
        self.prefill_worker = decision.worker_id if decision.worker_id != decode_worker else None
        self.hist_tokens, self.incr_tokens = hist_tokens, incr_tokens
        self.estimates = [
            {
                "route": str(estimate.route),
                "worker_id": estimate.worker_id,
                "total_s": estimate.total_s,
                "prefill_s": estimate.prefill_s,
                "queue_s": estimate.queue_s,
                "transfer_s": estimate.transfer_s,
            }
            for estimate in decision.estimates
        ]

    def prefilled(self, report: RoundReport) -> None:
        """Measurements of the worker that ran the prefill."""
        self.queued_s, self.prefill_s = report["queued_s"], report["prefill_s"]
        self.cached_tokens, self.slices = report["cached_tokens"], report.get("slices", 1)
        self.hit_tokens = report.get("hit_tokens", {})
        self.kv_reload_s += report.get("reload_s", 0.0)

    def read_history(self, report: RoundReport) -> None:
        """KV that the prefill worker read from the decode worker."""
        self.kv_read_tokens_history += report["kv_read_tokens"]
        self.kv_read_bytes_history += report["kv_read_bytes"]
        self.kv_read_s_history += report["kv_read_s"]

    def read_increment(self, report: RoundReport) -> None:
        """KV that the decode worker read from the prefill worker."""
        self.kv_read_tokens_increment += report["kv_read_tokens"]
        self.kv_read_bytes_increment += report["kv_read_bytes"]
        self.kv_read_s_increment += report["kv_read_s"]
        self.kv_reload_s += report.get("reload_s", 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The record as it travels."""
        return asdict(self)
