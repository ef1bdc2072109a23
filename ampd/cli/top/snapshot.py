"""The object that `ampd top --json` prints and that the screen draws. docs/top.md#json explains its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import queued_s
from ampd.serving.kv_tiers import TIERS
from ampd.state.store import Heard, Overview
from ampd.telemetry.coordinator_view import CoordinatorView, ServedWindow, merged
from ampd.telemetry.metrics import names
from ampd.telemetry.window_counts import LENGTH_S, US, latency_summary
from ampd.types import KvWindow, Role, Route, WorkerView
from ampd.wire import fields_of

LARGEST_SESSIONS = 3

Row = Mapping[str, Any]
"""A part of the object, with the keys of docs/top.md#json. Values are None where nothing was measured."""


def snapshot_of(overview: Overview, now_s: float, model: PerformanceModel | None = None) -> dict[str, Any]:
    """The state of the graph that `overview` describes. Its place and time are for the caller to add.

    Args:
        now_s: time of reading, on the clock of the tasks' arrival times.
        model: predicts the wait in each queue; without one nothing is predicted.
    """
    coordinators = sorted(overview.coordinators, key=lambda entry: entry.view.coordinator_id)
    workers = sorted(overview.workers, key=lambda entry: (entry.view.role, entry.view.worker_id))
    notes = list(_notes([entry.view for entry in coordinators], [entry.view for entry in workers]))
    slos = [entry.view.slo for entry in coordinators]
    most_common = max(slos, key=slos.count, default=None)
    ages_s = [entry.age_s for entry in coordinators] + [entry.age_s for entry in workers]
    return {
        "oldest_word_s": max(ages_s, default=0.0),
        "slo": {"ttft_s": most_common.ttft_s, "itl_s": most_common.itl_s} if most_common else None,
        "window": _window(merged(entry.view.window for entry in coordinators)),
        "coordinators": [_coordinator(entry) for entry in coordinators],
        "workers": [_worker(entry, now_s, _queue_wait_s(entry.view, model, notes)) for entry in workers],
        "kv": _kv_of_all([entry.view for entry in workers]),
        "sessions": _sessions([entry.view for entry in workers]),
        "notes": notes,
    }


def _window(window: ServedWindow) -> Row:
    counts, span_s = Counter(window.counts), window.span_s
    outcomes = {outcome: counts[f"outcome {outcome}"] for outcome in names.OUTCOMES}
    rounds = sum(outcomes.values())
    judged = rounds - outcomes[names.ABANDONED]
    met = outcomes[names.MET]
    reasons = sorted(_reasons(counts), key=lambda row: (-row["rounds"], row["route"], row["reason"]))
    return {
        "length_s": LENGTH_S,
        "span_s": span_s,
        "rounds": rounds,
        "abandoned": outcomes[names.ABANDONED],
        "refused": counts["refused"],
        "errors": outcomes[names.FAILED],
        "rounds_per_s": _share(rounds, span_s),
        "output_tokens_per_s": _share(counts["output_tokens"], span_s),
        "attainment": {
            "rounds": _share(met, judged),
            "ttft": _share(met + outcomes[names.MISSED_ITL], judged),
            "itl": _share(met + outcomes[names.MISSED_TTFT], judged),
        },
        "targets": {
            "ttft_s": _share(counts["ttft_targets_us"] / US, rounds) or None,
            "itl_s": _share(counts["itl_targets_us"] / US, rounds) or None,
        },
        **{f"{kind}_s": latency_summary(counts, kind) for kind in ("ttft_initial", "ttft_incremental", "itl")},
        "routes": {route: sum(row["rounds"] for row in reasons if row["route"] == route) for route in map(str, Route)},
        "reasons": reasons,
        "sessions_bound": counts["bound"],
        "sessions_repinned": counts["moved"],
        "unnamed": counts["unnamed"],
    }


def _reasons(counts: Mapping[str, int]) -> Iterator[Row]:
    for key, rounds in counts.items():
        word, _, decided = key.partition(" ")
        if word == "route":
            route, _, reason = decided.partition(" ")
            yield {"route": route, "reason": reason, "rounds": rounds}


def _coordinator(entry: Heard[CoordinatorView]) -> Row:
    view, window = entry.view, _window(entry.view.window)
    return {
        "coordinator_id": view.coordinator_id,
        "age_s": entry.age_s,
        "routing": view.routing,
        "binding": view.binding,
        "pools": view.pools,
        "rounds_in_progress": view.rounds_in_progress,
        "rounds": window["rounds"],
        "attainment": window["attainment"]["rounds"],
        "local_share": _share(window["routes"][Route.LOCAL], sum(window["routes"].values())),
        "is_leading": view.is_leading,
        "is_state_heard": view.is_state_heard,
        "state_losses": view.state_losses,
    }


def _worker(entry: Heard[WorkerView], now_s: float, queue_wait_s: float | None) -> Row:
    view = entry.view
    return {
        "worker_id": view.worker_id,
        "age_s": entry.age_s,
        "role": str(view.role),
        "tp": view.parallelism.tp,
        "queue_prefills": view.queued_prefills,
        "queue_tokens": sum(task.incr_tokens for task in view.queue) + view.queue_rest.incr_tokens,
        "queue_wait_s": queue_wait_s,
        "oldest_wait_s": max((max(now_s - task.arrival_s, 0.0) for task in view.queue), default=None),
        "ttft_s": view.ttft.mean_s if view.ttft.count else None,
        "ttft_rounds": view.ttft.count,
        "itl_s": view.itl.mean_s if view.itl.count else None,
        "itl_tokens": view.itl.count,
        "decode_batch": view.decode_batch,
        "decode_context_tokens": view.decode_context_tokens,
        "kv_used_tokens": view.kv_used_tokens,
        "kv_capacity_tokens": view.kv_capacity_tokens,
        "store_used_tokens": view.store_used_tokens,
        "store_capacity_tokens": view.store_capacity_tokens,
        "sessions_held": len(view.held_tokens),
        "session_tokens": sum(view.held_tokens.values()),
        **_kv(view.kv_window),
    }


def _kv(window: KvWindow) -> Row:
    tiers = (window.device_tokens, window.store_tokens, window.peer_tokens, window.recomputed_tokens)
    return {
        "hit_tokens": dict(zip(TIERS, tiers, strict=True)),
        "evicted_tokens": window.evicted_tokens,
        "reload_s": {"count": window.reloads, "mean": _share(window.reload_s, window.reloads)},
    }


def _kv_of_all(workers: Sequence[WorkerView]) -> Row:
    windows = [fields_of(view.kv_window).values() for view in workers]
    return {
        "store_used_tokens": sum(view.store_used_tokens for view in workers),
        "store_capacity_tokens": sum(view.store_capacity_tokens for view in workers),
        **_kv(KvWindow(*map(sum, zip(*windows, strict=True)))),
    }


def _queue_wait_s(view: WorkerView, model: PerformanceModel | None, notes: list[str]) -> float | None:
    if model is None:
        return None
    try:
        return queued_s(view, model)
    except UserError as error:
        note = f"no predicted wait: {error}"
        if note not in notes:
            notes.append(note)
        return None


def _sessions(workers: Sequence[WorkerView]) -> Row:
    owners = [view for view in workers if view.role.owns_sessions]
    most_tokens: dict[str, int] = {}
    for view in owners:
        for session_id, tokens in view.held_tokens.items():
            most_tokens[session_id] = max(tokens, most_tokens.get(session_id, 0))
    held: list[Row] = [
        {"session_id": session_id, "worker_id": view.worker_id, "tokens": tokens}
        for view in owners
        for session_id, tokens in view.held_tokens.items()
        # A mixed worker also has copies of sessions that it prefilled for their owners, which hold more of them.
        if view.role is not Role.MIXED or tokens == most_tokens[session_id]
    ]
    largest = sorted(held, key=lambda row: (-row["tokens"], row["session_id"], row["worker_id"]))
    return {
        "held": len({row["session_id"] for row in held}),
        "tokens": sum(row["tokens"] for row in held),
        "largest": largest[:LARGEST_SESSIONS],
    }


def _notes(coordinators: Sequence[CoordinatorView], workers: Sequence[WorkerView]) -> Iterator[str]:
    if not workers and not coordinators:
        yield "no worker and no coordinator is alive in this namespace"
    if workers and not coordinators:
        yield "no coordinator is alive: no round can be served, and neither targets nor routes are known"
    if coordinators and not any(view.role.owns_sessions for view in workers):
        yield "no decode worker is alive: every round is refused with 503"
    if cut_off := [view.coordinator_id for view in coordinators if not view.is_state_heard]:
        yield f"without the shared state, deciding by the last known view: coordinator {', '.join(cut_off)}"
    if len({view.slo for view in coordinators}) > 1:
        yield "the coordinators have different targets (--ttft, --itl); those of most of them are shown"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
