"""A worker in the local copy: report by report it is what the changes make of its last publication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.estimates import Queue, queue_times
from ampd.state.known_worker import QUEUE_GRACE_S, KnownWorker, merge
from ampd.types import Parallelism, PrefillTask, QueueRest, Role, Slo, WorkerView
from tests.ampd.policies.routing_lab import PLAIN

TINY = load_performance_model("tiny-cpu")

names = st.sampled_from("abcdefgh")
reports = st.lists(
    st.tuples(st.just("enter"), names)
    | st.tuples(st.just("finish"), names)
    | st.tuples(st.just("publish"), st.lists(names, unique=True))
    | st.tuples(st.just("hold"), st.tuples(st.sampled_from("xyz"), st.integers(0, 9)))
    | st.tuples(st.just("decode"), st.tuples(st.integers(0, 9), st.integers(0, 9))),
    max_size=40,
)


def task(name: str, number: int) -> PrefillTask:
    """Each publication and each coordinator has its own object, and its own idea of the arrival."""
    return PrefillTask(name, name, 0, 10 + ord(name), number / 1000, Slo(1.0, 0.1))


@given(reports)
def test_reports_one_by_one_are_the_last_publication_with_all_changes(reports: list[tuple[str, Any]]) -> None:
    published = WorkerView("w", Role.PREFILL, Parallelism(2), held_tokens={"x": 3})
    worker = KnownWorker(published, PLAIN)
    entered: dict[str, PrefillTask] = {}
    done: set[str] = set()
    for number, (report, what) in enumerate(reports):
        if report == "enter":
            worker.enter(task(what, number), 0.0)
            if what not in done:
                entered.setdefault(what, task(what, number))
        elif report == "finish":
            worker.finish(what, 0.0)
            entered.pop(what, None)
            done.add(what)
        elif report == "hold":
            worker.hold(*what)
            changed = {**published.held_tokens, what[0]: what[1]}
            held = {name: tokens for name, tokens in changed.items() if tokens > 0}
            published = replace(published, held_tokens=held)
        elif report == "decode":
            worker.hold("y", 7, what)
            held = {**published.held_tokens, "y": 7}
            published = replace(published, held_tokens=held, decode_batch=what[0], decode_context_tokens=what[1])
        else:
            published = replace(published, queue=tuple(task(name, number) for name in what), held_tokens={"y": 4})
            assert worker.publish(published, 0.0) == 0
            entered = {name: entry for name, entry in entered.items() if name not in what}
        view = worker.view()
        assert view == merge(published, entered.values(), done)
        assert queue_times(view, PLAIN) == queue_times(replace(view, queue=tuple(view.queue)), PLAIN)


def test_an_earlier_view_stays_as_it_was() -> None:
    worker = KnownWorker(WorkerView("w", Role.PREFILL, queue=(task("a", 0),), held_tokens={"x": 3}), PLAIN)
    before = worker.view()
    assert worker.view() is before
    worker.enter(task("b", 1), 0.0)
    worker.finish("a", 0.0)
    worker.hold("x", 0)
    assert [queued.task_id for queued in before.queue] == ["a"]
    assert before.held_tokens == {"x": 3}
    assert [queued.task_id for queued in worker.view().queue] == ["b"]
    assert worker.view().held_tokens == {}


def test_a_forgotten_queue_is_empty_until_something_is_entered_or_published() -> None:
    view = WorkerView("w", Role.PREFILL, queue=(task("a", 0),), queue_rest=QueueRest(tasks=2, incr_tokens=200))
    worker = KnownWorker(view, PLAIN)
    worker.enter(task("b", 1), 0.0)
    worker.forget_queue()
    assert worker.view().queued_prefills == 0
    worker.enter(task("c", 2), 1.0)
    assert [queued.task_id for queued in worker.view().queue] == ["c"]
    worker.finish("c", 2.0)
    assert worker.view().queued_prefills == 0
    worker.publish(view, 3.0)
    assert [queued.task_id for queued in worker.view().queue] == ["a"]


def test_prefills_that_are_done_are_remembered_for_a_short_time() -> None:
    worker = KnownWorker(WorkerView("w", Role.PREFILL), PLAIN)
    for number in range(100):
        worker.finish(str(number), float(number))
    assert len(worker._done) == QUEUE_GRACE_S + 1


def test_the_times_of_a_queue_are_predicted_when_it_is_published() -> None:
    """The decision that needs them is waited for. A report that changes no queue leaves them as they are."""
    view = WorkerView("w", Role.PREFILL, queue=Queue([task("a", 0), task("b", 0)]))
    worker = KnownWorker(view, PLAIN)
    for _ in range(2):
        worker.hold("x", 3, (3, 300))
        queue = worker.view().queue
        assert isinstance(queue, Queue)
        assert queue.times is not None
        assert queue.times is queue_times(worker.view(), PLAIN)
        worker.publish(replace(view, queue=Queue([task("c", 0)])), 0.0)


def test_a_parallelism_that_the_model_lacks_is_an_error_of_decisions_only() -> None:
    view = WorkerView("w", Role.PREFILL, Parallelism(64), queue=Queue([task("a", 0)]))
    worker = KnownWorker(view, TINY)
    worker.publish(view, 0.0)
    assert [each.task_id for each in worker.view().queue] == ["a"]
