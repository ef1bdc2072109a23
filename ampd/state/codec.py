"""Views, tasks and events as JSON, for Redis: msgspec writes and checks them by the annotations of their types.

A record has no times of arrival, because no two machines share a clock. A time in it counts from the moment of writing,
and is mostly negative. A reader adds the time of writing on its own clock. All functions that decode raise `CodecError`
for a record that is malformed, or of a kind that this version does not know.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import replace
from typing import TypeVar

from msgspec import json

from ampd.policies.estimates import Queue
from ampd.state.known_worker import merge
from ampd.state.store import RoleAssigned, StateEvent, TaskQueued, WorkerUpdated
from ampd.types import CoordinatorView, PrefillTask, WorkerView

Decoded = TypeVar("Decoded")

log = logging.getLogger(__name__)

_encode = json.Encoder().encode
_tasks, _views, _coordinators = json.Decoder(PrefillTask), json.Decoder(WorkerView), json.Decoder(CoordinatorView)
_roles, _events = json.Decoder(RoleAssigned), json.Decoder[StateEvent](StateEvent)

_WORKER_ID = re.compile(rb'"worker_id":"(\w{1,64})"')


class CodecError(Exception):
    """A record that this version cannot read."""


def encode_task(task: PrefillTask, now_s: float) -> bytes:
    """A task as written at `now_s`, on the clock of its `arrival_s`."""
    return _encode(task.shifted(-now_s))


def decode_task(record: bytes, written_s: float) -> PrefillTask:
    """A task that was written at `written_s` on the reader's clock."""
    return _read(_tasks, record).shifted(written_s)


def encode_view(view: WorkerView, now_s: float) -> bytes:
    """A worker's view as written at `now_s`, on the clock of its queue's arrivals."""
    return _encode(_shifted(view, -now_s))


def decode_view(record: bytes, written_s: float) -> WorkerView:
    """A view that was written at `written_s` on the reader's clock."""
    return _shifted(_read(_views, record), written_s)


def encode_coordinator(view: CoordinatorView) -> bytes:
    return _encode(view)


def decode_coordinator(record: bytes) -> CoordinatorView:
    """The inverse of `encode_coordinator`."""
    return _read(_coordinators, record)


def encode_event(event: StateEvent, now_s: float) -> bytes:
    """An event as published at `now_s`."""
    return _encode(_on_clock(event, -now_s))


def decode_event(record: bytes, now_s: float) -> StateEvent:
    """An event that arrived at `now_s` on the reader's clock."""
    return _on_clock(_read(_events, record), now_s)


def encode_role(role: RoleAssigned) -> bytes:
    """An assigned role, as record and as event."""
    return _encode(role)


def decode_role(record: bytes) -> RoleAssigned:
    """The inverse of `encode_role`."""
    return _read(_roles, record)


def _shifted(view: WorkerView, by_s: float) -> WorkerView:
    return replace(view, queue=Queue(task.shifted(by_s) for task in view.queue))


def _on_clock(event: StateEvent, by_s: float) -> StateEvent:
    match event:
        case WorkerUpdated(view, lease_s, done):
            return WorkerUpdated(_shifted(view, by_s), lease_s, done)
        case TaskQueued(worker_id, task):
            return TaskQueued(worker_id, task.shifted(by_s))
    return event


def _read(decoder: json.Decoder[Decoded], record: bytes) -> Decoded:
    try:
        return decoder.decode(record)
    except (ValueError, RecursionError) as error:
        worker = _WORKER_ID.search(record)
        whose = f" of worker {worker[1].decode()!r}" if worker else ""
        raise CodecError(f"unreadable record{whose}: {error}") from None


class SnapshotReader:
    """Turns the server's records into views, and the server's times into times of the reader's clock."""

    def __init__(self, server_now_ms: int, now_s: float) -> None:
        self._server_now_ms = server_now_ms
        self._now_s = now_s

    def worker(self, view: bytes, queue: list[bytes]) -> WorkerView:
        """A worker's view with the prefills that were entered or finished since (task id, record, task id, ...)."""
        entered: list[tuple[float, PrefillTask]] = []
        done: set[str] = set()
        for task_id, change in zip(queue[::2], queue[1::2], strict=True):
            try:
                written_s, record = self._stamped(change)
                if record:
                    entered.append((written_s, decode_task(record, written_s)))
                else:
                    done.add(task_id.decode())
            except (CodecError, UnicodeDecodeError) as error:
                warn_once(f"left out a task: {error}")
        entered.sort(key=lambda item: (item[0], item[1].arrival_s))
        written_s, record = self._stamped(view)
        return merge(decode_view(record, written_s), [task for _, task in entered], done)

    def age_s(self, record: bytes) -> float:
        """Seconds since a stamped record was written, by the server's clock.

        Raises:
            CodecError: the stamp is no number.
        """
        try:
            return (self._server_now_ms - int(record.partition(b" ")[0])) / 1000
        except (ValueError, OverflowError):
            raise CodecError("a record without the time of writing") from None

    def _stamped(self, record: bytes) -> tuple[float, bytes]:
        return self._now_s - self.age_s(record), record.partition(b" ")[2]


@functools.lru_cache(maxsize=1024)
def warn_once(line: str) -> None:
    """Log a line once, because a worker may publish the same nonsense many times per second."""
    log.warning("%s", line)
