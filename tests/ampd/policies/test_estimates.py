"""Predicted times of routes: what is computed, what waits, and what has to move."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import (
    Queue,
    estimate_local,
    estimate_remote,
    history_at,
    history_read_s,
    index_of_least,
    least_queued,
    queue_times,
    queued_in_passes_s,
    queued_s,
    shortest_pass_s,
    towards,
)
from ampd.types import Parallelism, PrefillTask, QueueRest, Role, Route, Slo, WorkerView
from tests.ampd.policies.routing_lab import PLAIN, decode, prefill, queue_of, round_of

MODEL = load_performance_model("tiny-cpu")

QWEN = load_performance_model("qwen3-32b-h20")
TP2, TP4 = Parallelism(2), Parallelism(4)

tokens = st.integers(0, 20_000)
tasks_of_any_length = st.builds(
    PrefillTask,
    st.just("t"),
    st.just("s"),
    st.integers(0, 100_000),
    st.integers(0, 3000) | st.integers(0, 40),
    st.just(0.0),
    st.just(Slo(1.0, 0.04)),
)


def situation(hist: int, incr: int, *workers: object, own: object = None) -> RoutingSituation:
    return RoutingSituation(
        task=round_of(hist, incr),
        decode=own or decode(30, 50),  # type: ignore[arg-type]
        prefill=workers,  # type: ignore[arg-type]
        model=PLAIN,
        now_s=0.0,
        rng=random.Random(1),
    )


@given(st.lists(st.integers(0, 5000), max_size=6))
def test_queued_work_is_the_sum_of_its_parts(queue: list[int]) -> None:
    worker = prefill("p", *queue)
    assert queued_s(worker, PLAIN) == pytest.approx(sum((10 + tokens) / 1000 for tokens in queue if tokens))


@given(st.lists(tasks_of_any_length, max_size=20))
def test_of_the_short_prefills_only_the_first_pays_the_fixed_time_of_a_pass(queue: list[PrefillTask]) -> None:
    fixed_s = shortest_pass_s(QWEN, 0, TP2)
    total_s, is_shared = 0.0, False
    for task in queue:
        time_s = QWEN.prefill_s(task.hist_tokens, task.incr_tokens, TP2)
        is_short = time_s < 2 * fixed_s
        total_s += max(time_s - fixed_s, 0.0) if is_short and is_shared else time_s
        is_shared = is_shared or is_short
    assert queued_in_passes_s(WorkerView("w", Role.PREFILL, TP2, tuple(queue)), QWEN) == pytest.approx(total_s)


@given(st.lists(tasks_of_any_length, max_size=5), st.integers(1, 9), tasks_of_any_length)
def test_counted_prefills_take_the_same_time_as_listed_ones(
    queue: list[PrefillTask], more: int, each: PrefillTask
) -> None:
    listed = WorkerView("w", Role.PREFILL, TP2, (*queue, *[each] * more))
    rest = QueueRest(more, more * each.hist_tokens, more * each.incr_tokens)
    counted = replace(listed, queue=tuple(queue), queue_rest=rest)
    assert queued_s(counted, QWEN) == pytest.approx(queued_s(listed, QWEN))
    assert queued_in_passes_s(counted, QWEN) == pytest.approx(queued_in_passes_s(listed, QWEN))
    assert len(queue_times(counted, QWEN).listed_s) == len(queue)


def test_a_queue_keeps_its_times_for_the_same_model_parallelism_and_rest() -> None:
    view = WorkerView("w", Role.PREFILL, TP2, Queue(queue_of(100, 2000)))
    times = queue_times(view, QWEN)
    assert queue_times(replace(view, decode_batch=3), QWEN) is times
    others = [
        (replace(view, parallelism=TP4), QWEN),
        (replace(view, queue=Queue(view.queue[1:])), QWEN),
        (replace(view, queue_rest=QueueRest(2, 0, 80)), QWEN),
        (view, PLAIN),
    ]
    for other, model in others:
        assert queue_times(view, QWEN) == times
        assert queue_times(other, model) == queue_times(replace(other, queue=tuple(other.queue)), model) != times
    assert view == WorkerView("w", Role.PREFILL, TP2, queue_of(100, 2000)), "it is a tuple like any other"
    assert pickle.loads(pickle.dumps(view)) == view


@pytest.mark.slow
@given(tokens, st.integers(1, 20_000), tokens)
def test_what_the_prefill_worker_lacks_moves_there_and_the_increment_back(hist: int, incr: int, held: int) -> None:
    worker = replace(prefill("p", 70), held_tokens={"s": held, "other": 9})
    asked = situation(hist, incr, worker)
    estimate = estimate_remote(asked, worker)
    assert estimate.transfer_s == pytest.approx((max(hist - held, 0) + incr) / 100_000)
    assert estimate.prefill_s == pytest.approx((10 + incr) / 1000)
    assert estimate.queue_s == pytest.approx(0.08)
    assert estimate.total_s == pytest.approx(estimate.prefill_s + estimate.queue_s + estimate.transfer_s)
    here = estimate_local(asked)
    assert (here.route, here.transfer_s, here.queue_s) == (Route.LOCAL, 0.0, pytest.approx(0.1))


def test_the_sessions_own_worker_is_the_local_route_whatever_its_role() -> None:
    own = prefill("d", 30)
    asked = situation(100, 200, own, own=own)
    assert estimate_remote(asked, own) == estimate_local(asked)
    assert towards(own, own, "why").route is Route.LOCAL
    assert towards(prefill("p"), own, "why").route is Route.REMOTE


def test_the_least_queued_work_is_chosen_and_all_are_recorded() -> None:
    workers = [prefill("a", 500), prefill("b", 100, 100), prefill("c", 300)]
    decision = least_queued(situation(0, 10, *workers), workers, "short")
    assert (decision.worker_id, decision.reason) == ("b", "short")
    assert [estimate.worker_id for estimate in decision.estimates] == ["a", "b", "c"]


def test_equals_share() -> None:
    dice = random.Random(2)
    chosen = Counter(index_of_least([1.0, 0.5, 0.5, 2.0, 0.5], dice) for _ in range(900))
    assert chosen.keys() == {1, 2, 4}
    assert min(chosen.values()) > 240


def test_prefills_that_a_view_does_not_list_count_with_their_mean() -> None:
    tasks = tuple(PrefillTask(f"t{number}", "s", 100, 400, 0.0, Slo(1.0, 0.1)) for number in range(20))
    whole = WorkerView("w", Role.PREFILL, queue=tasks)
    short = WorkerView("w", Role.PREFILL, queue=tasks[:5], queue_rest=QueueRest(15, 1500, 6000))
    assert queued_s(short, MODEL) == pytest.approx(queued_s(whole, MODEL))
    passes_s = [queued_in_passes_s(view, MODEL) for view in (short, whole)]
    assert passes_s[0] == pytest.approx(passes_s[1])
    assert short.queued_prefills == whole.queued_prefills == 20


def test_what_a_prefill_worker_holds_for_other_sessions_is_neither_read_nor_computed() -> None:
    worker = replace(prefill("p"), held_tokens={"s": 30})
    asked = situation(100, 200, worker)

    def with_prefix(tokens: int) -> tuple[int, int]:
        """(tokens that are not computed, tokens that are read)."""
        known = replace(asked, shared_tokens={"p": tokens, "other": 999})
        return history_at(known, worker), round(history_read_s(known, worker) * 100_000)

    assert with_prefix(0) == with_prefix(20) == (100, 70)
    assert with_prefix(60) == (100, 40)
    assert with_prefix(160) == (160, 0)
    # The last token of the prompt is computed in any case.
    assert with_prefix(300) == (299, 0)
    estimate = estimate_remote(replace(asked, shared_tokens={"p": 160}), worker)
    assert estimate.prefill_s == pytest.approx((10 + 140) / 1000)
    assert estimate.transfer_s == pytest.approx(200 / 100_000)  # the session's own worker lacks all of the increment
