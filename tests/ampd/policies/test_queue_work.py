"""The work of a queue: whatever enters and leaves, it equals what is added up from what is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.passes import shortest_pass_s
from ampd.policies.queue_work import QueueWork, queued, work_of
from ampd.types import Parallelism, PrefillTask, QueueRest, Role, Slo, WorkerView
from tests.ampd.policies.routing_lab import PLAIN, queue_of

MODEL = load_performance_model("qwen3-32b-h20")
TP2, TP4 = Parallelism(2), Parallelism(4)

tasks = st.builds(
    PrefillTask,
    st.uuids().map(str),
    st.sampled_from("abc"),
    st.integers(0, 100_000),
    st.integers(0, 3000) | st.integers(0, 40),
    st.floats(0, 100),
    st.sampled_from([Slo(0.25, 0.04), Slo(1.0, 0.04), Slo(5.0, 0.1)]),
    session_missed=st.booleans(),
)
changes = st.lists(
    st.tuples(st.just("enter"), st.lists(tasks, min_size=1, max_size=12))
    | st.tuples(st.sampled_from(["leave", "shrink"]), st.integers(0, 99)),
    max_size=30,
)


@pytest.mark.slow
@given(changes, st.floats(0, 110))
def test_work_equals_what_is_added_up(changes: list[tuple[str, list[PrefillTask] | int]], now_s: float) -> None:
    queue: list[PrefillTask] = []
    work = QueueWork(MODEL, TP2)
    for action, what in changes:
        before, earlier = work, (work.total_s, work.in_passes_s(queue), list(queue))
        if isinstance(what, list):
            work = work.changed(entered=what)
            queue += what
        elif queue:
            old = queue[what % len(queue)]
            new = replace(
                old, hist_tokens=old.hist_tokens + old.incr_tokens // 2, incr_tokens=(old.incr_tokens + 1) // 2
            )
            if action == "leave":
                work = work.changed(left=(old,))
                queue.remove(old)
            else:
                work = work.changed((old,), (new,))
                queue[queue.index(old)] = new
        fresh = QueueWork(MODEL, TP2).changed(entered=queue)
        assert (work.total_s, work.in_passes_s(queue)) == (fresh.total_s, fresh.in_passes_s(queue))
        assert work.not_over(now_s) == fresh.not_over(now_s)
        assert (before.total_s, before.in_passes_s(earlier[2])) == earlier[:2], "a change makes another one"
    times_s = [MODEL.prefill_s(task.hist_tokens, task.incr_tokens, TP2) for task in queue]
    assert work.total_s == pytest.approx(sum(times_s))
    assert work.in_passes_s(queue) == pytest.approx(in_passes_s(times_s))
    in_time = sorted(task.arrival_s for task in queue if task.arrival_s + task.slo.ttft_s >= now_s)
    rows = work.not_over(now_s)
    assert sorted(arrival_s for deadline_s, _, arrival_s, _, _ in rows if deadline_s >= now_s) == in_time
    assert rows == sorted(rows)


def in_passes_s(times_s: list[float]) -> float:
    """Added up one by one: of the prefills shorter than two shortest passes, all but the first save a pass's time."""
    fixed_s = shortest_pass_s(MODEL, 0, TP2)
    total_s, is_shared = 0.0, False
    for time_s in times_s:
        if time_s < 2 * fixed_s and is_shared:
            time_s = max(time_s - fixed_s, 0.0)
        is_shared = is_shared or time_s < 2 * fixed_s
        total_s += time_s
    return total_s


@given(st.lists(tasks, max_size=5), st.lists(st.tuples(st.integers(1, 9), tasks), min_size=1, max_size=3))
def test_counted_prefills_behind_the_queue(queue: list[PrefillTask], rests: list[tuple[int, PrefillTask]]) -> None:
    """Asked again and again, by the rest of that time."""
    work = QueueWork(MODEL, TP2).changed(entered=queue)
    for more, each in [*rests, *rests]:
        whole = work.changed(entered=[each] * more)
        rest = QueueRest(more, more * each.hist_tokens, more * each.incr_tokens)
        for _ in range(2):
            assert work.with_rest_s(queue, rest) == pytest.approx(whole.in_passes_s([*queue, *[each] * more]))


def test_a_changed_queue_adds_its_rest_up_again() -> None:
    """The first short prefill of the whole queue pays for a pass. So the rest costs less behind a short one."""
    short, rest = queue_of(40), QueueRest(2, 0, 80)
    empty = QueueWork(MODEL, TP2)
    alone_s = empty.with_rest_s([], rest)
    behind, fresh = (work.changed(entered=short) for work in (empty, QueueWork(MODEL, TP2)))
    assert behind.with_rest_s(short, rest) == fresh.with_rest_s(short, rest)
    assert 0.0 < behind.with_rest_s(short, rest) - behind.in_passes_s(short) < alone_s


def test_what_is_not_there_cannot_leave() -> None:
    first, second = queue_of(100, 200)
    work = QueueWork(PLAIN, TP2).changed(entered=(first,))
    for other in (second, replace(first, arrival_s=1.0)):
        with pytest.raises(ValueError, match="does not have it"):
            work.changed(left=(other,))


def test_a_view_carries_the_work_of_its_model_and_parallelism() -> None:
    queue = queue_of(100, 200)
    work = QueueWork(PLAIN, TP2).changed(entered=queue)
    view = WorkerView("w", Role.PREFILL, TP2, queued(queue, work))
    assert work_of(view, PLAIN) is work
    assert work_of(replace(view, decode_batch=3), PLAIN) is work
    assert view == WorkerView("w", Role.PREFILL, TP2, queue), "it is a tuple like any other"
    fresh = [
        (replace(view, parallelism=TP4), PLAIN),
        (replace(view, queue=view.queue[1:]), PLAIN),
        (replace(view, queue=queue), PLAIN),
        (view, MODEL),
    ]
    for other, model in fresh:
        added = work_of(other, model)
        assert added is not work
        assert (added.model, added.parallelism) == (model, other.parallelism)
        assert added.total_s == pytest.approx(
            sum(model.prefill_s(task.hist_tokens, task.incr_tokens, other.parallelism) for task in other.queue)
        )
