"""The decision record of a round: the decision, its estimates, and the measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ampd.round_end import Measures
from ampd.serving.placement import Plan
from ampd.state.store import Binding
from ampd.wire import fields_of


@dataclass(frozen=True, slots=True)
class RoundFacts:
    """What is known of a round before it is placed.

    Attributes:
        session_id: the client's name of the session, or a fresh one; `session_key`: its name inside of the graph.
        policy: the routing policy that decides.
        request_id, trace_id: the ids of the round in the logs of all processes; None: Dynamo carries no traces.
        ttft_target_s, itl_target_s: the round's targets.
        clamped_targets: `ttft_target`, `itl_target`: the client set it outside of the graph's limits.
    """

    session_id: str
    policy: str
    session_key: str = ""
    request_id: str = ""
    trace_id: str | None = None
    ttft_target_s: float = 0.0
    itl_target_s: float = 0.0
    clamped_targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """A placement. A later one of the same round replaces it.

    Attributes:
        route, reason: where the increment is prefilled, and which rule of the policy decided it.
        prefill_worker: None: the decode worker.
        hist_tokens, incr_tokens: how the decision split the prompt.
        shared_tokens: of the prompt's beginning that the prefilling worker was known to hold for other sessions.
        estimates: the routes that were compared.
    """

    route: str = ""
    reason: str = ""
    decode_worker: str = ""
    prefill_worker: str | None = None
    epoch: int = 0
    hist_tokens: int = 0
    incr_tokens: int = 0
    shared_tokens: int = 0
    estimates: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class DecisionRecord:
    """Returned to clients that ask for `nvext.extra_fields: ["engine_data"]`, as `nvext.engine_data.ampd`.

    Attributes:
        move_reason: why the session moved to another decode worker before this round; "": it did not.
        kept_tokens: of the prompt, in the context of its session before, as far as is known. Their KV may be gone.
        rewritten: the prompt departs from the session's last context.
        retries: workers that failed this round.
        ttft_s: from the request's arrival at the coordinator to the first token's departure; None: none has left yet.
    """

    facts: RoundFacts
    decided: Decided = field(default_factory=Decided)
    measures: Measures = field(default_factory=Measures)
    move_reason: str = ""
    kept_tokens: int = 0
    rewritten: bool = False
    retries: int = 0
    ttft_s: float | None = None

    def placed(self, plan: Plan, binding: Binding) -> None:
        """A placement; a later one of the same round replaces it."""
        decision, decode_worker = plan.decision, binding.worker_id
        self.decided = Decided(
            str(decision.route),
            decision.reason,
            decode_worker,
            decision.worker_id if decision.worker_id != decode_worker else None,
            binding.epoch,
            plan.task.hist_tokens,
            plan.task.incr_tokens,
            plan.shared_tokens,
            [{**fields_of(estimate), "route": str(estimate.route)} for estimate in decision.estimates],
        )
        self.move_reason = self.move_reason or plan.move_reason

    def as_dict(self) -> dict[str, Any]:
        """The record as it travels."""
        return {
            **fields_of(self.facts),
            **fields_of(self.decided),
            **self.measures.as_dict(),
            "move_reason": self.move_reason,
            "kept_tokens": self.kept_tokens,
            "rewritten": self.rewritten,
            "retries": self.retries,
            "ttft_s": self.ttft_s,
        }
