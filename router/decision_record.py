"""The record of a round: what was asked, the decision and its estimates, the measurements, and how it ended.

It is passed once at the round's end to the observers: metrics, log, the window for `ampd top`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ampd.round_end import Measures
from ampd.serving.placement import Plan
from ampd.state.store import Binding
from ampd.telemetry.metrics import names
from ampd.types import Slo
from ampd.wire import fields_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DecisionRecord:
    """Returned to clients that ask for `nvext.extra_fields: ["engine_data"]`, as `nvext.engine_data.ampd`.

    Attributes:
        session_id: the client's name of the session, or a fresh one; `session_key`: its name inside of the graph.
        policy: the routing policy that decides.
        request_id, trace_id: the ids of the round in the logs of all processes; None: Dynamo carries no traces.
        clamped_targets: `ttft_target`, `itl_target`: the client set it outside of the graph's limits.
        route, reason: where the increment is prefilled, and which rule of the policy decided it. A later placement of
            the same round replaces this and the following.
        prefill_worker: None: the decode worker.
        hist_tokens, incr_tokens: how the decision split the prompt.
        shared_tokens: of the prompt's beginning that the prefilling worker was known to hold for other sessions.
        estimates: the routes that were compared.
        move_reason: why the session moved to another decode worker before this round; "": it did not.
        kept_tokens: of the prompt, in the context of its session before, as far as is known. Their KV may be gone.
        rewritten: the prompt departs from the session's contexts.
        breaks_at_tokens: where it departs from the nearest one, if it loses more of it than its last output.
        retries: workers that failed this round.
        ttft_s: from the request's arrival at the coordinator to the first token's departure; None: none has left yet.
        itl_s: mean gap of its first choice; None: it had fewer than two tokens.
        output_tokens: of its first choice.
        lasted_s: from its arrival to its end.
        is_initial: its session was bound by this round.
        is_complete: it ended by itself: neither the client left nor a worker was lost for good.
        was_left: the client ended it, which is also how the frontend ends a round at a stop string.
    """

    session_id: str
    policy: str
    slo: Slo
    session_key: str = ""
    request_id: str = ""
    trace_id: str | None = None
    clamped_targets: tuple[str, ...] = ()
    route: str = ""
    reason: str = ""
    decode_worker: str = ""
    prefill_worker: str | None = None
    epoch: int = 0
    hist_tokens: int = 0
    incr_tokens: int = 0
    shared_tokens: int = 0
    estimates: list[dict[str, Any]] = field(default_factory=list)
    measures: Measures = field(default_factory=Measures)
    move_reason: str = ""
    kept_tokens: int = 0
    rewritten: bool = False
    breaks_at_tokens: int | None = None
    retries: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    output_tokens: int = 0
    lasted_s: float = 0.0
    is_initial: bool = False
    is_complete: bool = False
    was_left: bool = False

    def placed(self, plan: Plan, binding: Binding) -> None:
        """A placement; a later one of the same round replaces it."""
        decision, self.decode_worker = plan.decision, binding.worker_id
        self.route, self.reason = str(decision.route), decision.reason
        self.prefill_worker = decision.worker_id if decision.worker_id != self.decode_worker else None
        self.epoch = binding.epoch
        self.hist_tokens, self.incr_tokens = plan.task.hist_tokens, plan.task.incr_tokens
        self.shared_tokens = plan.shared_tokens
        self.estimates = [{**fields_of(estimate), "route": str(estimate.route)} for estimate in decision.estimates]
        self.move_reason = self.move_reason or plan.move_reason

    def as_dict(self) -> dict[str, Any]:
        """The record as the client gets it."""
        told: dict[str, Any] = {name: getattr(self, name) for name in _TOLD}
        targets = {"ttft_target_s": self.slo.ttft_s, "itl_target_s": self.slo.itl_s}
        return {**told, **targets, **self.measures.as_dict()}

    # -- how it ended

    @property
    def ttft_met(self) -> bool:
        """Whether the first token came in time."""
        return self.slo.ttft_met(self.ttft_s)

    @property
    def itl_met(self) -> bool:
        """Whether the mean gap was within its target; a single token has none."""
        return self.slo.itl_met(self.itl_s)

    @property
    def outcome(self) -> str:
        """The value of `names.OUTCOMES` that the round counts as against its targets, as far as it came."""
        if not self.is_complete and not self.was_left:
            return names.FAILED
        in_time = self.ttft_met or (self.ttft_s is None and self.lasted_s <= self.slo.ttft_s)
        if not in_time:
            return names.MISSED_TTFT if self.itl_met else names.MISSED_BOTH
        if self.ttft_s is None and not self.is_complete:
            return names.ABANDONED
        return names.MET if self.itl_met else names.MISSED_ITL


_UNTOLD = ("slo", "measures", "itl_s", "output_tokens", "lasted_s", "is_initial", "is_complete", "was_left")
_TOLD: tuple[str, ...] = tuple(name for name in DecisionRecord.__match_args__ if name not in _UNTOLD)

Observer = Callable[[DecisionRecord], None]
"""An observer must not wait, because it runs in the round's own task."""


def notify(observers: Iterable[Observer], record: DecisionRecord) -> None:
    """Call each observer with a round. An error of an observer is logged; the round and the others go on."""
    for observe in observers:
        try:
            observe(record)
        except Exception:
            log.exception("an observer of rounds failed")
