"""A worker in the local copy: report by report it is what the changes make of its last publication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.estimates import Queue, queue_times
from ampd.state.known_worker import KnownWorker
from ampd.state.overlay import merge
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
    held: dict[str, int] = {}
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
            held[what[0]] = what[1]
        elif report == "decode":
            worker.decode(*what)
            published = replace(published, decode_batch=what[0], decode_context_tokens=what[1])
        else:
            published = replace(published, queue=tuple(task(name, number) for name in what), held_tokens={"y": 4})
            assert worker.publish(published, 0.0) == 0
            entered = {name: entry for name, entry in entered.items() if name not in what}
            held.clear()
        view = worker.view()
        assert view == merge(published, entered.values(), done, held)
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


def test_prefills_go_one_by_one_at_the_pace_of_the_model_and_a_publication_brings_the_truth_back() -> None:
    tasks = tuple(task(name, number) for number, name in enumerate("abc"))
    ends = [PLAIN.prefill_s(0, each.incr_tokens, Parallelism(2)) for each in tasks]
    view = WorkerView("w", Role.PREFILL, Parallelism(2), queue=tasks)
    worker = KnownWorker(view, PLAIN)
    assert worker.work_off(5.0, 5.0) == 5.0 + ends[0]
    assert worker.work_off(5.0, 5.0 + ends[0]) == 5.0 + ends[0] + ends[1]
    assert [each.task_id for each in worker.view().queue] == ["b", "c"]
    worker.enter(task("d", 4), 50.0)
    assert worker.work_off(5.0, 49.0) == 50.0 + PLAIN.prefill_s(0, task("d", 4).incr_tokens, Parallelism(2))
    assert [each.task_id for each in worker.view().queue] == ["d"], "none begins before it was entered"
    assert worker.work_off(5.0, 60.0) == float("inf")
    assert worker.view().queue == ()
    worker.publish(view, 61.0)
    assert [each.task_id for each in worker.view().queue] == ["a", "b", "c"]
    assert worker.work_off(61.0, 61.0) == 61.0 + ends[0]


def test_a_prefill_that_ends_before_its_time_takes_nothing_of_the_next_ones() -> None:
    tasks = tuple(task(name, 0) for name in "abc")
    first_s, second_s, _ = (PLAIN.prefill_s(0, each.incr_tokens, Parallelism(2)) for each in tasks)
    worker = KnownWorker(WorkerView("w", Role.PREFILL, Parallelism(2), queue=tasks), PLAIN)
    worker.work_off(0.0, 0.1 * first_s)
    worker.end("a", 0.9 * first_s)
    end_s = 0.9 * first_s + second_s
    assert worker.work_off(0.0, first_s) == pytest.approx(end_s)
    worker.end("c", first_s)  # its client left
    assert worker.work_off(0.0, first_s) == pytest.approx(end_s)
    assert [each.task_id for each in worker.view().queue] == ["b"]


def test_the_times_of_a_queue_are_predicted_when_it_is_published() -> None:
    """The decision that needs them is waited for. A report that changes no queue leaves them as they are."""
    view = WorkerView("w", Role.PREFILL, queue=Queue([task("a", 0), task("b", 0)]))
    worker = KnownWorker(view, PLAIN)
    for _ in range(2):
        worker.decode(3, 300)
        queue = worker.view().queue
        assert isinstance(queue, Queue)
        assert queue.times is not None
        assert queue.times is queue_times(worker.view(), PLAIN)
        worker.publish(replace(view, queue=Queue([task("c", 0)])), 0.0)


def test_a_parallelism_that_the_model_lacks_is_an_error_of_decisions_only() -> None:
    view = WorkerView("w", Role.PREFILL, Parallelism(64), queue=Queue([task("a", 0)]))
    worker = KnownWorker(view, TINY)
    worker.publish(view, 0.0)
    assert worker.work_off(0.0, 1e9) == float("inf")
    assert [each.task_id for each in worker.view().queue] == ["a"]


def test_without_a_model_nothing_is_predicted() -> None:
    worker = KnownWorker(WorkerView("w", Role.PREFILL, queue=(task("a", 0),)), None)
    assert worker.work_off(0.0, 1e9) == float("inf")
    assert [each.task_id for each in worker.view().queue] == ["a"]


PACE = Parallelism(2)
EPSILON_S = 1e-9
times_s = st.floats(0.0, 5.0)


@given(
    listed=st.lists(names, unique=True, max_size=4),
    rest_tasks=st.integers(0, 3),
    entered=st.lists(st.tuples(times_s, names), max_size=8, unique_by=lambda each: each[1]),
    looks_s=st.lists(times_s, max_size=8),
)
def test_without_news_prefills_run_one_after_the_other_from_when_they_were_entered(
    listed: list[str], rest_tasks: int, entered: list[tuple[float, str]], looks_s: list[float]
) -> None:
    """And how often the queue is looked at changes nothing."""
    queue = tuple(task(name, 0) for name in listed)
    rest = QueueRest(tasks=rest_tasks, incr_tokens=100 * rest_tasks)
    worker = KnownWorker(WorkerView("w", Role.PREFILL, PACE, queue=queue, queue_rest=rest), PLAIN)
    free_s, ends_s = 0.0, dict[str, float]()
    for each in queue:
        free_s = ends_s[each.task_id] = free_s + PLAIN.prefill_s(0, each.incr_tokens, PACE)
    free_s = rest_s = free_s + rest_tasks * PLAIN.prefill_s(0, 100, PACE)
    for at_s, name in sorted(each for each in entered if each[1] not in listed):
        free_s = ends_s[name] = max(free_s, at_s) + PLAIN.prefill_s(0, task(name, 0).incr_tokens, PACE)
    there = set(listed)
    for now_s, name in sorted([*entered, *((look_s, "") for look_s in looks_s)]):
        if name and name not in listed:
            worker.enter(task(name, 0), now_s)
            there.add(name)
        worker.work_off(0.0, now_s)
        view = worker.view()
        assert {each.task_id for each in view.queue} <= {name for name in there if ends_s[name] > now_s - EPSILON_S}
        assert {each.task_id for each in view.queue} >= {name for name in there if ends_s[name] > now_s + EPSILON_S}
        assert not view.queue_rest.tasks or rest_s > now_s - EPSILON_S
    assert worker.work_off(0.0, free_s + 1.0) == float("inf")
    assert worker.view().queue == ()
    assert worker.view().queue_rest.tasks == 0
