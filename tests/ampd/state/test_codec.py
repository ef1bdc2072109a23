"""Records in Redis: what one process writes another reads unchanged, and nonsense is refused with the worker's name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.state import codec
from ampd.state.store import (
    RoleAssigned,
    SessionEnded,
    StateEvent,
    TaskDone,
    TaskQueued,
    WorkerRemoved,
    WorkerUpdated,
)
from ampd.types import (
    CoordinatorView,
    KvWindow,
    Parallelism,
    PrefillTask,
    QueueRest,
    Role,
    ServedWindow,
    Slo,
    Window,
    WorkerView,
)

from .sound_view import sound_view

NOW_S = 1000.0
LATER_S = 5000.0
"""The reader's clock at the time of writing."""

counts = st.integers(0, 1 << 40)
seconds = st.floats(0, 1e6)
texts = st.text(max_size=20)
slos = st.builds(Slo, seconds, seconds)
# Waits travel in whole microseconds.
waits = st.integers(0, 10**9).map(lambda microseconds: microseconds / 1e6)
tasks = st.builds(PrefillTask, texts, texts, counts, counts, waits, slos, st.integers(0, 9), st.booleans())
windows = st.builds(Window, seconds, counts)
views = st.builds(
    WorkerView,
    texts,
    st.sampled_from(Role),
    st.builds(Parallelism, st.integers(1, 64)),
    st.lists(tasks, max_size=4).map(tuple),
    windows,
    windows,
    counts,
    counts,
    counts,
    counts,
    counts,
    st.dictionaries(texts, counts, max_size=4),
    texts,
    texts,
    counts,
    counts,
    st.just(QueueRest()) | st.builds(QueueRest, st.integers(1, 1 << 20), counts, counts),
    st.just(KvWindow()) | st.builds(KvWindow, counts, counts, counts, counts, counts, counts, seconds),
    st.dictionaries(texts, counts, max_size=4),
)
roles = st.builds(RoleAssigned, texts, st.sampled_from(Role), texts, texts)
events = st.one_of(
    st.builds(WorkerUpdated, views, st.none() | seconds),
    st.builds(WorkerRemoved, texts, st.booleans()),
    st.builds(TaskQueued, texts, tasks),
    st.builds(TaskDone, texts, texts),
    st.builds(SessionEnded, texts),
    roles,
)
served = st.builds(ServedWindow, span_s=seconds, counts=st.dictionaries(texts, counts, max_size=5))
coordinators = st.builds(CoordinatorView, texts, slos, texts, texts, texts, counts, st.booleans(), window=served)


def written_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def task_read(task: PrefillTask) -> PrefillTask:
    """The task as it is read, on the reader's clock; `arrival_s` is how long it had waited when it was written."""
    fields = {name: getattr(task, name) for name in PrefillTask.__slots__}
    return PrefillTask(**{**fields, "arrival_s": pytest.approx(LATER_S - task.arrival_s, abs=1e-5)})


def written(task: PrefillTask) -> PrefillTask:
    fields = {name: getattr(task, name) for name in PrefillTask.__slots__}
    return PrefillTask(**{**fields, "arrival_s": NOW_S - task.arrival_s})


def on_clock(view: WorkerView, clock: Any) -> WorkerView:
    fields = {name: getattr(view, name) for name in WorkerView.__slots__}
    return WorkerView(**{**fields, "queue": tuple(map(clock, view.queue))})


def event_on_clock(event: StateEvent, clock: Any) -> StateEvent:
    match event:
        case WorkerUpdated(view, lease_s):
            return WorkerUpdated(on_clock(view, clock), lease_s)
        case TaskQueued(worker_id, task):
            return TaskQueued(worker_id, clock(task))
        case _:
            return event


@given(views)
def test_a_view_survives_and_its_tasks_keep_their_age(view: WorkerView) -> None:
    record = codec.encode_view(on_clock(view, written), NOW_S)
    assert on_clock(view, task_read) == codec.decode_view(record, LATER_S)


def test_fields_that_another_version_writes_or_leaves_out_are_ignored() -> None:
    view = WorkerView("w", Role.DECODE, shared_prefixes={"k": 64})
    fields = json.loads(codec.encode_view(view, NOW_S))
    del fields["store_used_tokens"]
    assert codec.decode_view(written_json(fields | {"of_a_later_version": 1}), NOW_S) == view


def test_a_role_that_this_version_does_not_know_is_refused() -> None:
    """The store skips such a record: the reader neither uses the worker nor ends."""
    fields = json.loads(codec.encode_view(WorkerView("w", Role.DECODE), NOW_S)) | {"role": "encode"}
    with pytest.raises(codec.CodecError, match=r"worker 'w'.*encode"):
        codec.decode_view(written_json(fields), NOW_S)
    with pytest.raises(codec.CodecError, match="encode"):
        codec.decode_role(b'["RoleAssigned","w","encode","","test"]')


@given(events)
def test_an_event_survives(event: StateEvent) -> None:
    record = codec.encode_event(event_on_clock(event, written), NOW_S)
    assert event_on_clock(event, task_read) == codec.decode_event(record, LATER_S)


@given(tasks, roles, coordinators)
def test_tasks_roles_and_coordinators_survive(task: PrefillTask, role: RoleAssigned, view: CoordinatorView) -> None:
    assert task_read(task) == codec.decode_task(codec.encode_task(written(task), NOW_S), LATER_S)
    assert codec.decode_role(codec.encode_role(role)) == role
    assert codec.decode_coordinator(codec.encode_coordinator(view)) == view


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=5), values, max_size=4),
    max_leaves=8,
)
kinds = st.sampled_from(["WorkerUpdated", "WorkerRemoved", "TaskQueued", "TaskDone", "SessionEnded", "RoleAssigned"])


@given(
    st.one_of(json_values.map(written_json), st.tuples(kinds, json_values, json_values).map(written_json), st.binary())
)
def test_whatever_lies_in_redis_is_read_or_refused_in_one_line(record: bytes) -> None:
    refusals = []
    for decode in (codec.decode_view, codec.decode_event, codec.decode_task):
        try:
            decode(record, NOW_S)
        except codec.CodecError as error:
            refusals.append(str(error))
    for decode_plain in (codec.decode_role, codec.decode_coordinator):
        try:
            decode_plain(record)
        except codec.CodecError as error:
            refusals.append(str(error))
    assert not any("\n" in line for line in refusals)


NONSENSE: dict[str, Any] = {
    "max_context_tokens": None,
    "kv_used_tokens": "x",
    "kv_capacity_tokens": -1e9,
    "store_used_tokens": -1,
    "store_capacity_tokens": None,
    "decode_batch": True,
    "decode_context_tokens": 1 << 60,
    "ttft": {"mean_s": float("nan")},
    "itl": {"mean_s": -0.5},
    "parallelism": {"tp": "two"},
    "held_tokens": {"s": -1},
    "label": "x" * 10_000,
    "queue": [{}],
    "queue_rest": {"hist_tokens": -1},
    "kv_window": {"reload_s": -0.5},
    "role": "boss",
}


@pytest.mark.parametrize("tokens", [-1, pytest.param(10**400, id="huge"), 1.5])
def test_a_view_with_nonsensical_tokens_of_a_session_is_refused(tokens: float) -> None:
    fields = json.loads(codec.encode_view(sound_view(), 2.0))
    with pytest.raises(codec.CodecError, match="w1"):
        codec.decode_view(written_json({**fields, "held_tokens": {"s": 7, "t": tokens}}), 2.0)


@pytest.mark.parametrize("field", NONSENSE)
def test_a_view_with_a_nonsensical_field_is_refused(field: str) -> None:
    fields = json.loads(codec.encode_view(sound_view(), 2.0))
    assert codec.decode_view(written_json(fields), 2.0) == sound_view()
    with pytest.raises(codec.CodecError, match="w1"):
        codec.decode_view(written_json({**fields, field: NONSENSE[field]}), 2.0)


@pytest.mark.parametrize("lease_s", [float("nan"), float("inf"), -1, "5"])
def test_a_lease_must_end(lease_s: object) -> None:
    kind, view, *_ = json.loads(codec.encode_event(WorkerUpdated(sound_view(), 5.0), 2.0))
    with pytest.raises(codec.CodecError):
        codec.decode_event(written_json([kind, view, lease_s]), 2.0)


def test_a_deeply_nested_record_is_refused() -> None:
    with pytest.raises(codec.CodecError):
        codec.decode_view(b'{"worker_id":"w","more":' + b"[" * 100_000, 0.0)


def test_a_number_that_no_float_holds_is_refused() -> None:
    task = json.loads(codec.encode_task(PrefillTask("t", "s", 1, 2, 0.0, Slo(1.0, 0.1)), 0.0))
    with pytest.raises(codec.CodecError):
        codec.decode_task(written_json({**task, "arrival_s": 10**400}), 0.0)


@pytest.mark.parametrize(
    ("part", "value"),
    [("slo", {"ttft_s": 2.0, "itl_s": {}}), ("coordinator_id", 0), ("rounds_in_progress", "3"), ("slo", None)],
)
def test_a_coordinator_s_view_with_a_nonsensical_field_is_refused(part: str, value: Any) -> None:
    fields = json.loads(codec.encode_coordinator(CoordinatorView("c1", Slo(2.0, 0.1))))
    with pytest.raises(codec.CodecError):
        codec.decode_coordinator(written_json({**fields, part: value}))


@pytest.mark.parametrize(
    "window",
    [
        {"span_s": -1},
        {"counts": [5]},
        {"counts": {"output_tokens": "0"}},
        {"counts": {"outcome met": -1}},
        {"counts": {"outcome met": 0.5}},
    ],
)
def test_a_window_with_a_nonsensical_field_is_refused(window: dict[str, Any]) -> None:
    fields = json.loads(codec.encode_coordinator(CoordinatorView("c1", Slo(2.0, 0.1))))
    with pytest.raises(codec.CodecError):
        codec.decode_coordinator(written_json({**fields, "window": {**fields["window"], **window}}))
