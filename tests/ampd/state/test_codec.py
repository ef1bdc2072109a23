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
from ampd.telemetry.coordinator_view import CoordinatorView
from ampd.telemetry.latencies import Latencies
from ampd.telemetry.served_window import ServedWindow
from ampd.types import KvWindow, Parallelism, PrefillTask, QueueRest, Role, Slo, Window, WorkerView

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
    st.just(QueueRest()) | st.builds(QueueRest, st.integers(1, 1 << 40), counts, counts),
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
latencies = st.builds(Latencies, seconds, st.dictionaries(st.integers(-50, 200), counts, max_size=3))
served = st.builds(
    ServedWindow,
    span_s=seconds,
    rounds=counts,
    ttft_targets_s=seconds,
    itl_targets_s=seconds,
    routes=st.dictionaries(st.tuples(texts, texts), counts, max_size=3),
    ttft_initial=latencies,
    ttft_incremental=latencies,
    itl=latencies,
)
coordinators = st.builds(CoordinatorView, texts, slos, texts, texts, texts, counts, st.booleans(), window=served)


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
    assert codec.decode_view(codec.to_bytes(record), LATER_S) == codec.decode_view(record, LATER_S)


def test_a_view_of_a_worker_without_a_store_is_read() -> None:
    """Workers of the version before do not write these fields."""
    view = WorkerView("w", Role.DECODE, store_used_tokens=5, store_capacity_tokens=10)
    fields = json.loads(codec.encode_view(view, NOW_S))
    del fields["store_used_tokens"], fields["store_capacity_tokens"]
    assert codec.decode_view(json.dumps(fields), NOW_S) == WorkerView("w", Role.DECODE)


def test_a_view_without_shared_prefixes_is_as_it_was_before_there_were_any() -> None:
    assert "shared_prefixes" not in json.loads(codec.encode_view(WorkerView("w", Role.DECODE), NOW_S))
    view = WorkerView("w", Role.DECODE, shared_prefixes={"k": 64})
    fields = json.loads(codec.encode_view(view, NOW_S))
    assert codec.decode_view(json.dumps(fields), NOW_S) == view
    assert codec.decode_view(json.dumps(fields | {"of_a_later_version": 1}), NOW_S) == view


@pytest.mark.parametrize("role", Role)
def test_the_version_before_reads_the_role_of_every_view(role: Role) -> None:
    """It knows prefill and decode workers only, and ignores unknown fields. A mixed worker owns sessions."""
    fields = json.loads(codec.encode_view(WorkerView("w", role), NOW_S))
    assert fields["role"] == ("prefill" if role is Role.PREFILL else "decode")
    assert codec.decode_view(json.dumps(fields), NOW_S).role is role


def test_a_role_that_this_version_does_not_know_is_refused() -> None:
    """The store skips such a record: the reader neither uses the worker nor ends."""
    fields = json.loads(codec.encode_view(WorkerView("w", Role.DECODE), NOW_S)) | {"role": "encode"}
    with pytest.raises(codec.CodecError, match=r"worker 'w'.*encode"):
        codec.decode_view(json.dumps(fields), NOW_S)
    with pytest.raises(codec.CodecError, match="encode"):
        codec.decode_role('["role","w","encode","","test"]')


@given(events)
def test_an_event_survives(event: StateEvent) -> None:
    record = codec.encode_event(event_on_clock(event, written), NOW_S)
    assert event_on_clock(event, task_read) == codec.decode_event(record, LATER_S)


@given(tasks, roles, coordinators)
def test_tasks_roles_and_coordinators_survive(task: PrefillTask, role: RoleAssigned, view: CoordinatorView) -> None:
    assert task_read(task) == codec.decode_task(codec.encode_task(written(task), NOW_S), LATER_S)
    assert codec.decode_role(codec.encode_role(role)) == role
    assert codec.decode_coordinator(codec.encode_coordinator(view)) == view


@given(st.text(st.characters()))
def test_any_text_survives_as_bytes(text: str) -> None:
    assert codec.to_text(codec.to_bytes(text)) == text


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=5), values, max_size=4),
    max_leaves=8,
)
kinds = st.sampled_from(["updated", "removed", "queued", "done", "ended", "role"])


@given(st.one_of(json_values.map(json.dumps), st.tuples(kinds, json_values, json_values).map(json.dumps), st.text()))
def test_whatever_lies_in_redis_is_read_or_refused_in_one_line(record: str) -> None:
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
    "ttft": [float("nan"), 1],
    "itl": [-0.5, 1],
    "tp": "two",
    "held_tokens": {"s": -1},
    "label": "x" * 10_000,
    "queue": [{}],
    "queue_rest": [1, -1, 0],
    "kv_window": [1, 2, 3, 4, 5, 6, -0.5],
    "role": "boss",
}


@pytest.mark.parametrize("tokens", [-1, pytest.param(10**400, id="huge"), 1.5])
def test_a_view_with_nonsensical_tokens_of_a_session_is_refused(tokens: float) -> None:
    fields = json.loads(codec.encode_view(sound_view(), 2.0))
    with pytest.raises(codec.CodecError, match="w1"):
        codec.decode_view(json.dumps({**fields, "held_tokens": {"s": 7, "t": tokens}}), 2.0)


@pytest.mark.parametrize("field", NONSENSE)
def test_a_view_with_a_nonsensical_field_is_refused(field: str) -> None:
    fields = json.loads(codec.encode_view(sound_view(), 2.0))
    assert codec.decode_view(json.dumps(fields), 2.0) == sound_view()
    with pytest.raises(codec.CodecError, match="w1"):
        codec.decode_view(json.dumps({**fields, field: NONSENSE[field]}), 2.0)


@pytest.mark.parametrize("lease_s", [float("nan"), float("inf"), -1, "5"])
def test_a_lease_must_end(lease_s: object) -> None:
    kind, view, _ = json.loads(codec.encode_event(WorkerUpdated(sound_view(), 5.0), 2.0))
    with pytest.raises(codec.CodecError):
        codec.decode_event(json.dumps([kind, view, lease_s]), 2.0)


def test_a_deeply_nested_record_is_refused() -> None:
    with pytest.raises(codec.CodecError):
        codec.decode_event("[" * 100_000, 0.0)


def test_a_number_that_no_float_holds_is_refused() -> None:
    task = json.loads(codec.encode_task(PrefillTask("t", "s", 1, 2, 0.0, Slo(1.0, 0.1)), 0.0))
    with pytest.raises(codec.CodecError):
        codec.decode_task(json.dumps({**task, "waited_s": 10**400}), 0.0)


@pytest.mark.parametrize(
    ("part", "value"),
    [("slo", [2.0, {}]), ("coordinator_id", 0), ("rounds_in_progress", "3"), ("routes", [["local", "x", "1"]])],
)
def test_a_coordinator_s_view_with_a_nonsensical_field_is_refused(part: str, value: Any) -> None:
    fields = json.loads(codec.encode_coordinator(CoordinatorView("c1", Slo(2.0, 0.1))))
    with pytest.raises(codec.CodecError):
        codec.decode_coordinator(json.dumps({**fields, part: value}))


@pytest.mark.parametrize("window", [{"met_itl": [5]}, {"output_tokens": "0"}, {"length_s": -1}])
def test_a_window_with_a_nonsensical_field_is_refused(window: dict[str, Any]) -> None:
    fields = json.loads(codec.encode_coordinator(CoordinatorView("c1", Slo(2.0, 0.1))))
    with pytest.raises(codec.CodecError):
        codec.decode_coordinator(json.dumps({**fields, "window": {**fields["window"], **window}}))
