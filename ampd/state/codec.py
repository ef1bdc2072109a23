"""How views, tasks and events travel and are stored: compact JSON.

Arrival times do not travel, because no two machines share a clock: a task carries the seconds that it has waited at the
moment of writing, and a reader counts back from the moment of writing on its own clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from ampd.state.store import (
    HeldChanged,
    RoleAssigned,
    SessionEnded,
    StateEvent,
    TaskDone,
    TaskQueued,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.telemetry.coordinator_view import CoordinatorView
from ampd.telemetry.latencies import Latencies
from ampd.telemetry.served_window import ServedWindow
from ampd.types import Parallelism, PrefillTask, Role, Slo, Window, WorkerView

T = TypeVar("T")

_WINDOW_LATENCIES = ("ttft_initial", "ttft_incremental", "itl")
_WINDOW_NUMBERS = tuple(one.name for one in fields_of(ServedWindow) if one.name not in ("routes", *_WINDOW_LATENCIES))


class CodecError(Exception):
    """A record that this version cannot read."""


def to_bytes(text: str) -> bytes:
    """Any string as bytes, lone surrogates included: session ids are whatever a client sent."""
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes) -> str:
    """The inverse of `to_bytes`."""
    return data.decode("utf-8", "surrogatepass")


def encode_task(task: PrefillTask, now_s: float) -> str:
    """A task as written at `now_s`, on the clock of its `arrival_s`."""
    return _dump(_task_fields(task, now_s))


def decode_task(record: str | bytes, written_s: float) -> PrefillTask:
    """A task that was written at `written_s` on the reader's clock.

    Raises:
        CodecError: not such a record.
    """
    return _read(record, lambda fields: _task(fields, written_s))


def encode_view(view: WorkerView, now_s: float) -> str:
    """A worker's view as written at `now_s`, on the clock of its queue's arrivals."""
    return _dump(_view_fields(view, now_s))


def decode_view(record: str | bytes, written_s: float) -> WorkerView:
    """A view that was written at `written_s` on the reader's clock.

    Raises:
        CodecError: not such a record.
    """
    return _read(record, lambda fields: _view(fields, written_s))


def encode_coordinator(view: CoordinatorView) -> str:
    """A coordinator's view."""
    return _dump(_coordinator_fields(view))


def decode_coordinator(record: str | bytes) -> CoordinatorView:
    """The inverse of `encode_coordinator`.

    Raises:
        CodecError: not such a record.
    """
    return _read(record, _coordinator)


def encode_updated(view_record: str, lease_s: float) -> str:
    """The event of a view that is already encoded (the publish script joins the same text)."""
    return f'["updated",{view_record},{lease_s:g}]'


def encode_event(event: StateEvent, now_s: float) -> str:
    """An event as published at `now_s`."""
    match event:
        case WorkerUpdated(view, lease_s):
            return _dump(["updated", _view_fields(view, now_s), lease_s])
        case WorkerRemoved(worker_id, is_expired):
            return _dump(["removed", worker_id, *(["expired"] if is_expired else [])])
        case TaskQueued(worker_id, task):
            return _dump(["queued", worker_id, _task_fields(task, now_s)])
        case TaskDone(worker_id, task_id):
            return _dump(["done", worker_id, task_id])
        case HeldChanged(worker_id, session_id, tokens):
            return _dump(["held", worker_id, session_id, tokens])
        case SessionEnded(session_id):
            return _dump(["ended", session_id])
        case RoleAssigned():
            return encode_role(event)


def encode_role(role: RoleAssigned) -> str:
    """An assigned role: its record and its event are the same text."""
    return _dump(["role", role.worker_id, role.role.value, role.lane, role.reason])


def decode_role(record: str | bytes) -> RoleAssigned:
    """The inverse of `encode_role`.

    Raises:
        CodecError: not such a record.
    """
    return _read(record, _role)


def decode_event(record: str | bytes, now_s: float) -> StateEvent:
    """An event that arrived at `now_s` on the reader's clock.

    Raises:
        CodecError: not an event, or one of a kind that this version does not know.
    """
    return _read(record, lambda fields: _event(fields, now_s))


def _event(fields: list[Any], now_s: float) -> StateEvent:
    match fields:
        case ["updated", view, lease_s]:
            return WorkerUpdated(_view(view, now_s), lease_s)
        case ["removed", str(worker_id)]:
            return WorkerRemoved(worker_id)
        case ["removed", str(worker_id), "expired"]:
            return WorkerRemoved(worker_id, is_expired=True)
        case ["queued", str(worker_id), task]:
            return TaskQueued(worker_id, _task(task, now_s))
        case ["done", str(worker_id), str(task_id)]:
            return TaskDone(worker_id, task_id)
        case ["held", str(worker_id), str(session_id), int(tokens)]:
            return HeldChanged(worker_id, session_id, tokens)
        case ["ended", str(session_id)]:
            return SessionEnded(session_id)
        case ["role", *_]:
            return _role(fields)
        case _:
            raise ValueError("unknown kind of event")


def _role(fields: list[Any]) -> RoleAssigned:
    _, worker_id, role, lane, reason = fields
    return RoleAssigned(str(worker_id), Role(role), str(lane), str(reason))


def _task_fields(task: PrefillTask, now_s: float) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "session_id": task.session_id,
        "hist_tokens": task.hist_tokens,
        "incr_tokens": task.incr_tokens,
        "waited_s": round(now_s - task.arrival_s, 6),
        "ttft_s": task.slo.ttft_s,
        "itl_s": task.slo.itl_s,
        "postponements": task.postponements,
        "session_missed": task.session_missed,
    }


def _task(fields: dict[str, Any], written_s: float) -> PrefillTask:
    return PrefillTask(
        task_id=fields["task_id"],
        session_id=fields["session_id"],
        hist_tokens=fields["hist_tokens"],
        incr_tokens=fields["incr_tokens"],
        arrival_s=written_s - fields["waited_s"],
        slo=Slo(ttft_s=fields["ttft_s"], itl_s=fields["itl_s"]),
        postponements=fields.get("postponements", 0),
        session_missed=fields.get("session_missed", False),
    )


def _view_fields(view: WorkerView, now_s: float) -> dict[str, Any]:
    return {
        "worker_id": view.worker_id,
        "role": view.role.value,
        "tp": view.parallelism.tp,
        "queue": [_task_fields(task, now_s) for task in view.queue],
        "ttft": [view.ttft.mean_s, view.ttft.count],
        "itl": [view.itl.mean_s, view.itl.count],
        "decode_batch": view.decode_batch,
        "decode_context_tokens": view.decode_context_tokens,
        "kv_used_tokens": view.kv_used_tokens,
        "kv_capacity_tokens": view.kv_capacity_tokens,
        "max_context_tokens": view.max_context_tokens,
        "held_tokens": dict(view.held_tokens),
        "lane": view.lane,
    }


def _view(fields: dict[str, Any], written_s: float) -> WorkerView:
    return WorkerView(
        worker_id=fields["worker_id"],
        role=Role(fields["role"]),
        parallelism=Parallelism(tp=fields["tp"]),
        queue=tuple(_task(task, written_s) for task in fields["queue"]),
        ttft=Window(*fields["ttft"]),
        itl=Window(*fields["itl"]),
        decode_batch=fields["decode_batch"],
        decode_context_tokens=fields["decode_context_tokens"],
        kv_used_tokens=fields["kv_used_tokens"],
        kv_capacity_tokens=fields["kv_capacity_tokens"],
        max_context_tokens=fields["max_context_tokens"],
        held_tokens=fields["held_tokens"],
        lane=fields.get("lane", ""),
    )


def _coordinator_fields(view: CoordinatorView) -> dict[str, Any]:
    window = view.window
    return {
        "coordinator_id": view.coordinator_id,
        "slo": [view.slo.ttft_s, view.slo.itl_s],
        "policies": [view.routing, view.binding, view.pools],
        "rounds_in_progress": view.rounds_in_progress,
        "is_leading": view.is_leading,
        "is_state_heard": view.is_state_heard,
        "state_losses": view.state_losses,
        "window": {name: getattr(window, name) for name in _WINDOW_NUMBERS},
        "routes": [[route, reason, rounds] for (route, reason), rounds in window.routes.items()],
        "latencies": {name: _latencies_fields(getattr(window, name)) for name in _WINDOW_LATENCIES},
    }


def _coordinator(fields: dict[str, Any]) -> CoordinatorView:
    routing, binding, pools = fields["policies"]
    window: dict[str, Any] = {name: fields["window"][name] for name in _WINDOW_NUMBERS}
    window |= {name: _latencies(fields["latencies"][name]) for name in _WINDOW_LATENCIES}
    window["routes"] = {(route, reason): rounds for route, reason, rounds in fields["routes"]}
    return CoordinatorView(
        coordinator_id=fields["coordinator_id"],
        slo=Slo(*fields["slo"]),
        routing=routing,
        binding=binding,
        pools=pools,
        rounds_in_progress=fields["rounds_in_progress"],
        is_leading=fields["is_leading"],
        is_state_heard=fields["is_state_heard"],
        state_losses=fields["state_losses"],
        window=ServedWindow(**window),
    )


def _latencies_fields(latencies: Latencies) -> list[Any]:
    return [latencies.total_s, list(latencies.buckets.items())]


def _latencies(fields: list[Any]) -> Latencies:
    total_s, buckets = fields
    return Latencies(total_s, dict(buckets))


def _dump(fields: Any) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _read(record: str | bytes, build: Callable[[Any], T]) -> T:
    try:
        return build(json.loads(to_text(record) if isinstance(record, bytes) else record))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CodecError(f"unreadable record: {error!r}") from None
