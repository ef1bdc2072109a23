"""The result of a simulation: rounds, gaps between tokens, and the timeline of the workers."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ampd.errors import RunError
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


# -- the timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing

_LANES = {"compute": 1, "kv-in": 2}
"""First thread of a lane. The lane with the highest number may have more threads after it."""
_US = 1e6


def trace_events(run: SimulationRun) -> Iterator[dict[str, Any]]:
    """The events of the "Trace Event Format" of Chromium, with times in microseconds.

    A worker is a process and its lanes are threads. Bars of one thread may nest but not cross, so that overlapping
    reads are on separate threads (`kv-in`, `kv-in 2`, ...).
    """
    processes = {worker_id: number for number, worker_id in enumerate(run.worker_roles, start=1)}
    threads = _threads(run.timeline)
    most = Counter[str]()
    for span, tid in zip(run.timeline, threads, strict=True):
        most[span.worker_id] = max(most[span.worker_id], tid)
    for worker_id, pid in processes.items():
        yield _named("process_name", pid, 0, worker_id)
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for lane, tid in _LANES.items():
            yield _named("thread_name", pid, tid, lane)
        for tid in range(_LANES["kv-in"] + 1, most[worker_id] + 1):
            yield _named("thread_name", pid, tid, f"kv-in {tid - _LANES['kv-in'] + 1}")
    for span, tid in zip(run.timeline, threads, strict=True):
        yield _complete(span, processes[span.worker_id], tid)
    yield from _batches(run, processes)


def _threads(spans: Sequence[Span]) -> list[int]:
    """Thread number of every span. A read gets the first thread of its lane that is free."""
    threads = [_LANES[span.lane] for span in spans]
    ends: dict[str, list[float]] = {}
    for position in sorted(range(len(spans)), key=lambda position: spans[position].start_s):
        span = spans[position]
        if span.lane == "kv-in":
            taken = ends.setdefault(span.worker_id, [])
            lane = next((lane for lane, end_s in enumerate(taken) if end_s <= span.start_s), len(taken))
            taken[lane : lane + 1] = [span.end_s]
            threads[position] += lane
    return threads


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.kind,
        "cat": span.lane,
        "pid": pid,
        "tid": tid,
        "ts": span.start_s * _US,
        "dur": (span.end_s - span.start_s) * _US,
        "args": dict(span.detail),
    }


def _batches(run: SimulationRun, processes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The size of every decode batch, as a counter."""
    for span in run.timeline:
        if span.kind == "decode":
            for at_s, batch in ((span.start_s, span.detail["batch"]), (span.end_s, 0)):
                yield {
                    "ph": "C",
                    "name": "decode batch",
                    "pid": processes[span.worker_id],
                    "tid": 0,
                    "ts": at_s * _US,
                    "args": {"sequences": batch},
                }


def write_timeline(run: SimulationRun, path: Path) -> None:
    """Write the trace, packed if the name ends in `.gz`. Raises `RunError` if it cannot be written."""
    text = json.dumps({"traceEvents": list(trace_events(run)), "displayTimeUnit": "ms"})
    try:
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
