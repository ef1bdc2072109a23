"""Views, tasks and events as compact JSON, for Redis.

A record has no arrival times, because no two machines share a clock. A task carries the seconds that it had waited at
the time of writing, and a reader counts back from the time of writing on its own clock. All functions that decode
raise `CodecError` for a record that is malformed, or of a kind that this version does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ampd import wire
from ampd.policies.estimates import Queue
from ampd.recent_load import RecentRound
from ampd.state.checks import check_count, check_duration, checked
from ampd.state.store import (
    LoadedRound,
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
from ampd.telemetry.served_window import LATENCIES, ServedWindow
from ampd.types import KvWindow, Parallelism, PrefillTask, QueueRest, Role, Slo, Window, WorkerView

T = TypeVar("T")

_dump = json.JSONEncoder(separators=(",", ":")).encode

_NO_KV = KvWindow()
_OFTEN_EMPTY = ("shared_prefixes", "tokenizer")

_POLICIES = ("routing", "binding", "pools")

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What reading a malformed record may raise."""


class CodecError(Exception):
    """A record that this version cannot read."""


def to_bytes(text: str) -> bytes:
    """Any string as bytes, including lone surrogates, because a client may send any session id."""
    return text.encode("utf-8", "surrogatepass")


def to_text(data: bytes) -> str:
    """The inverse of `to_bytes`."""
    return data.decode("utf-8", "surrogatepass")


def encode_task(task: PrefillTask, now_s: float) -> str:
    """A task as written at `now_s`, on the clock of its `arrival_s`."""
    return _dump(wire.encode_task(task, now_s))


def decode_task(record: str | bytes, written_s: float) -> PrefillTask:
    """A task that was written at `written_s` on the reader's clock."""
    return _read(record, lambda fields: checked(wire.decode_task(fields, written_s)))


def encode_view(view: WorkerView, now_s: float) -> str:
    """A worker's view as written at `now_s`, on the clock of its queue's arrivals."""
    return _dump(_view_fields(view, now_s))


def decode_view(record: str | bytes, written_s: float) -> WorkerView:
    """A view that was written at `written_s` on the reader's clock."""
    return _read(record, lambda fields: _view(fields, written_s))


def encode_load(rounds: Sequence[LoadedRound], now_s: float) -> str:
    """Ended rounds as written at `now_s`, on the clock of their times."""
    return _dump([_loaded_fields(session_id, item, now_s) for session_id, item in rounds])


def decode_load(record: str | bytes, written_s: float) -> list[LoadedRound]:
    """Ended rounds that were written at `written_s` on the reader's clock."""
    return _read(record, lambda batch: [_loaded_round(fields, written_s) for fields in _listed(batch)])


def encode_coordinator(view: CoordinatorView) -> str:
    return _dump(_coordinator_fields(view))


def decode_coordinator(record: str | bytes) -> CoordinatorView:
    """The inverse of `encode_coordinator`."""
    return _read(record, _coordinator)


def encode_event(event: StateEvent, now_s: float) -> str:
    """An event as published at `now_s`."""
    match event:
        case WorkerUpdated(view, lease_s):
            return _dump(["updated", _view_fields(view, now_s), lease_s])
        case WorkerRemoved(worker_id, is_expired):
            return _dump(["removed", worker_id, *(["expired"] if is_expired else [])])
        case TaskQueued(worker_id, task):
            return _dump(["queued", worker_id, wire.encode_task(task, now_s)])
        case TaskDone(worker_id, task_id):
            return _dump(["done", worker_id, task_id])
        case SessionEnded(session_id):
            return _dump(["ended", session_id])
        case RoleAssigned():
            return encode_role(event)


def encode_role(role: RoleAssigned) -> str:
    """An assigned role, as record and as event."""
    return _dump(["role", role.worker_id, role.role.value, role.label, role.reason])


def decode_role(record: str | bytes) -> RoleAssigned:
    """The inverse of `encode_role`."""
    return _read(record, _role)


def decode_event(record: str | bytes, now_s: float) -> StateEvent:
    """An event that arrived at `now_s` on the reader's clock."""
    return _read(record, lambda fields: _event(fields, now_s))


def _event(fields: list[Any], now_s: float) -> StateEvent:
    match fields:
        case ["updated", view, lease_s]:
            if lease_s is not None:
                check_duration(lease_s)
            return WorkerUpdated(_view(view, now_s), lease_s)
        case ["removed", str(worker_id)]:
            return WorkerRemoved(worker_id)
        case ["removed", str(worker_id), "expired"]:
            return WorkerRemoved(worker_id, is_expired=True)
        case ["queued", str(worker_id), task]:
            return TaskQueued(worker_id, checked(wire.decode_task(task, now_s)))
        case ["done", str(worker_id), str(task_id)]:
            return TaskDone(worker_id, task_id)
        case ["ended", str(session_id)]:
            return SessionEnded(session_id)
        case ["role", *_]:
            return _role(fields)
        case _:
            raise ValueError("unknown kind of event")


def _role(fields: list[Any]) -> RoleAssigned:
    _, worker_id, role, label, reason = fields
    return RoleAssigned(str(worker_id), Role(role), str(label), str(reason))


def _view_fields(view: WorkerView, now_s: float) -> dict[str, Any]:
    fields, rest = wire.fields_of(view), view.queue_rest
    del fields["parallelism"], fields["queue_rest"], fields["kv_window"]
    if view.kv_window != _NO_KV:
        fields["kv_window"] = list(wire.fields_of(view.kv_window).values())
    if rest.tasks:
        fields["queue_rest"] = [rest.tasks, rest.hist_tokens, rest.incr_tokens]
    for name in _OFTEN_EMPTY:
        if not fields[name]:
            del fields[name]
    if view.role is Role.MIXED:
        # A version without mixed workers then reads a decode worker. It binds sessions to it, and sends no prefills.
        fields["role"], fields["takes_prefills"] = Role.DECODE, True
    return fields | {
        "tp": view.parallelism.tp,
        "queue": [wire.encode_task(task, now_s) for task in view.queue],
        "ttft": [view.ttft.mean_s, view.ttft.count],
        "itl": [view.itl.mean_s, view.itl.count],
        "held_tokens": dict(view.held_tokens),
    }


def _view(fields: dict[str, Any], written_s: float) -> WorkerView:
    try:
        return checked(
            wire.from_fields(
                WorkerView,
                fields,
                role=_view_role(fields),
                parallelism=Parallelism(tp=fields["tp"]),
                queue=Queue(wire.decode_task(task, written_s) for task in fields["queue"]),
                ttft=Window(*fields["ttft"]),
                itl=Window(*fields["itl"]),
                queue_rest=QueueRest(*fields.get("queue_rest", ())),
                kv_window=KvWindow(*fields.get("kv_window", ())),
            )
        )
    except _MALFORMED as error:
        raise ValueError(f"view of worker {str(fields['worker_id'])[:64]!r}: {error!r}") from None


def _view_role(fields: dict[str, Any]) -> Role:
    role = Role(fields["role"])
    return Role.MIXED if role is Role.DECODE and fields.get("takes_prefills") is True else role


def _coordinator_fields(view: CoordinatorView) -> dict[str, Any]:
    fields, window = wire.fields_of(view), wire.fields_of(view.window)
    latencies: dict[str, Latencies] = {name: window.pop(name) for name in LATENCIES}
    policies = [fields.pop(name) for name in _POLICIES]
    return fields | {
        "slo": [view.slo.ttft_s, view.slo.itl_s],
        "policies": policies,
        "routes": [[route, reason, rounds] for (route, reason), rounds in window.pop("routes").items()],
        "latencies": {name: [each.total_s, list(each.buckets.items())] for name, each in latencies.items()},
        "window": window,
    }


def _coordinator(fields: dict[str, Any]) -> CoordinatorView:
    latencies = {name: fields["latencies"][name] for name in LATENCIES}
    window = wire.from_fields(
        ServedWindow,
        fields["window"],
        routes={(route, reason): rounds for route, reason, rounds in fields["routes"]},
        **{name: Latencies(total_s, dict(buckets)) for name, (total_s, buckets) in latencies.items()},
    )
    policies = dict(zip(_POLICIES, fields["policies"], strict=True))
    return checked(wire.from_fields(CoordinatorView, fields, slo=Slo(*fields["slo"]), window=window, **policies))


def _read(record: str | bytes, build: Callable[[Any], T]) -> T:
    try:
        return build(json.loads(to_text(record) if isinstance(record, bytes) else record))
    except _MALFORMED as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise CodecError(f"unreadable record: {reason}") from None


def _listed(batch: Any) -> list[Any]:
    if not isinstance(batch, list):
        raise ValueError("not a list")
    return batch


def _loaded_fields(session_id: str, item: RecentRound, now_s: float) -> list[Any]:
    assert item.ended_s is not None
    times = [round(now_s - when_s, 4) for when_s in (item.sent_s, item.ended_s)]
    return [session_id, *times, item.kept_tokens, item.prompt_tokens, item.output_tokens, int(bool(item.is_met))]


def _loaded_round(fields: list[Any], written_s: float) -> LoadedRound:
    session_id, sent_ago_s, ended_ago_s, *tokens, is_met = fields
    kept_tokens, prompt_tokens, output_tokens = tokens
    for ago_s in (sent_ago_s, ended_ago_s):
        check_duration(ago_s)
    for count in tokens:
        check_count(count)
    if kept_tokens > prompt_tokens:
        raise ValueError(f"more tokens are kept than the prompt has: {tokens}")
    if not isinstance(session_id, str) or sent_ago_s < ended_ago_s:
        raise ValueError(f"no round: {session_id!r}, sent {sent_ago_s} s ago, ended {ended_ago_s} s ago")
    item = RecentRound(written_s - sent_ago_s, kept_tokens, prompt_tokens)
    item.end(written_s - ended_ago_s, output_tokens, bool(is_met))
    return session_id, item
