"""The result of a simulation: rounds, gaps between tokens, and the timeline of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ampd.types import Slo
from workloads.results import (
    Attainment,
    PromptTokens,
    RoundRecord,
    attainment,
    percentiles,
    shared_result,
)


@dataclass(slots=True)
class SimulatedRound:
    """One round; the fields it shares with `workloads.results.RoundRecord` mean the same.

    Attributes:
        sent_s: when the round was sent, in seconds from the start of the run.
        hist_tokens: context that is kept from earlier rounds; incr_tokens: new tokens of the prompt.
        itl_s: mean gap between the round's tokens; None with fewer than two tokens.
        route, reason: where it is prefilled and which rule decided it; None and "": it is not placed.
        worker_id, decode_worker_id: the workers that prefill and decode it.
        missing_tokens: history that was prefilled again, because the decode worker had lost its KV.
        queued_s: from its entry in the prefill queue to the start of its computation.
        kv_history_tokens, kv_increment_tokens: KV moved to the prefill worker and back.
    """

    session_id: str
    index: int
    sent_s: float
    hist_tokens: int
    incr_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    error: str | None = None
    route: str | None = None
    reason: str = ""
    worker_id: str = ""
    decode_worker_id: str = ""
    missing_tokens: int = 0
    queued_s: float = 0.0
    kv_history_tokens: int = 0
    kv_increment_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.hist_tokens + self.incr_tokens

    def as_recorded(self) -> RoundRecord:
        """The round as a replay would record it, so that both have the same figures and causes.

        From the start of its computation to its first token it counts as prefill, with the work of others between
        passes.
        """
        return RoundRecord(
            self.session_id,
            self.index,
            self.sent_s,
            PromptTokens(self.hist_tokens, self.incr_tokens),
            self.output_tokens,
            ttft_s=self.ttft_s,
            gaps_s=[] if self.itl_s is None else [self.itl_s],
            e2e_s=self.e2e_s,
            error=self.error,
            decision={
                "route": self.route,
                "reason": self.reason,
                "incr_tokens": self.incr_tokens,
                "queued_s": self.queued_s,
                "ttft_s": self.ttft_s,
                "prefill_s": max((self.ttft_s or 0.0) - self.queued_s, 0.0),
                "hit_tokens": {"recomputed": self.missing_tokens},
            },
        )

    @property
    def ended_s(self) -> float:
        """When its last token came; a refused round ends as it is sent."""
        return self.sent_s + (self.e2e_s or 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a worker: a bar of the timeline.

    Attributes:
        lane: `compute` (prefills, decode batches) or `kv-in` (reads from other workers).
        kind: `prefill`, `decode`, `kv-history` or `kv-increment`.
        detail: session, tokens, batch size.
    """

    worker_id: str
    lane: str
    kind: str
    start_s: float
    end_s: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GapRun:
    """Consecutive decode steps of one worker without a change of its batch.

    Step k (from 0) of `steps` lasts `first_s + k * growth_s`, and is a gap between tokens of `batch` requests.
    """

    first_s: float
    growth_s: float
    steps: int
    batch: int


@dataclass(slots=True)
class SimulationRun:
    """A finished simulation.

    Attributes:
        rounds: in order of their end.
        rounds_planned: session id -> its rounds.
        gaps: all gaps between tokens, as runs.
        worker_roles: worker id -> its role at the start, in the order of the cluster.
        lost_sessions: number of times that a session's KV was evicted between its rounds, at the worker that owns it.
        role_flips: number of times that a worker changed its role or its label.
        refusals: attempts to send a round that were refused because of load; None: no round is ever refused.
        moves: how often a session moved to another owner; None: no session ever moves.
        kv_store: figures of workers with a KV store, as in a result; None: there is no store.
        events: number of handled events, as a measure of the work.
        duration_s: virtual time from 0 to the last token.
        busy_s: worker id -> seconds of its `prefill` passes, mixed ones included, and of its `decode` steps.
    """

    rounds: list[SimulatedRound]
    rounds_planned: dict[str, int]
    gaps: Sequence[GapRun]
    worker_roles: dict[str, str]
    duration_s: float
    lost_sessions: int = 0
    role_flips: int = 0
    refusals: int | None = None
    moves: Mapping[str, int] | None = None
    events: int = 0
    kv_store: Mapping[str, Any] | None = None
    timeline: list[Span] = field(default_factory=list)
    busy_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def attainment(self, slo: Slo) -> Attainment:
        """The attainment of `result` alone."""
        return attainment(self.rounds, self.rounds_planned, slo)

    def result(self, slo: Slo, kv_bytes_per_token: int | None = None) -> dict[str, Any]:
        """The shared keys of a result, which a live replay has too."""
        moved = {
            "history": sum(record.kv_history_tokens for record in self.rounds),
            "increment": sum(record.kv_increment_tokens for record in self.rounds),
        }
        kv_bytes = {name: tokens * kv_bytes_per_token if kv_bytes_per_token else None for name, tokens in moved.items()}
        result = shared_result(
            self.rounds, self.rounds_planned, slo, self.duration_s, itl_s=gap_percentiles(self.gaps), kv_bytes=kv_bytes
        )
        counts = {"lost_sessions": self.lost_sessions, "role_flips": self.role_flips}
        refusals = {} if self.refusals is None else {"refusals": self.refusals}
        moves = {} if self.moves is None else {"moves": dict(self.moves)}
        store = {} if self.kv_store is None else {"kv_store": self.kv_store}
        return result | {"kv_tokens": moved} | counts | refusals | moves | store


def gap_percentiles(gaps: Sequence[GapRun]) -> dict[str, float | None]:
    """Mean, p50, p95 and p99 of all gaps between tokens."""
    if not gaps:
        return percentiles(())
    table = np.array([(run.first_s, run.growth_s, run.steps, run.batch) for run in gaps])
    steps = table[:, 2].astype(int)
    position = np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)
    first_s, growth_s, batch = (np.repeat(table[:, column], steps) for column in (0, 1, 3))
    return percentiles(first_s + position * growth_s, batch.astype(np.int64))
