"""Deflection: local where a schedule within the ITL target beats the best prefill worker."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Role, Route, RunningRound, Slo, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PlainModel, decode, prefill, queue_of, round_of, route

MODEL = load_performance_model("qwen3-32b-h20")
TP4 = Parallelism(4)
BUSY = prefill("busy", 200)


class FreeLinks(PlainModel):
    """Moving KV takes no time."""

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:  # noqa: ARG002
        return 0.0


def test_a_schedule_that_is_faster_than_the_queue_is_taken_and_recorded() -> None:
    # Steps of 10 ms leave 30: chunks of 20, 20 and 10 tokens; remote: 210 ms of queue, 60 of prefill, 30.5 of transfer.
    decision = route("deflection", round_of(3000, 50), decode(batch=5), BUSY)
    assert (decision.route, decision.worker_id, decision.reason) == (Route.LOCAL, "d", "deflected")
    here, there = decision.estimates
    assert (here.total_s, here.prefill_s, here.queue_s) == (pytest.approx(0.11), pytest.approx(0.11), 0.0)
    assert there.total_s == pytest.approx(0.21 + 0.06 + 0.0305)


def test_what_is_queued_there_is_cut_and_waited_for_too() -> None:
    # Two rounds of 50 tokens before it: 0.33 s against 0.3005.
    decision = route("deflection", round_of(3000, 50), decode(50, 50, batch=5), BUSY)
    assert (decision.route, decision.worker_id, decision.reason) == (Route.REMOTE, "busy", "faster")
    assert [estimate.worker_id for estimate in decision.estimates] == ["busy"]
    assert route("deflection", round_of(3000, 50), decode(50, batch=5), BUSY).estimates[0].queue_s == pytest.approx(
        0.11
    )


def test_a_batch_without_room_keeps_everything_away() -> None:
    # 20 sequences take 25 ms a step; of the 15 that are left a pass takes 10: chunks of 5 tokens.
    crowded = decode(batch=20)
    assert route("deflection", round_of(0, 50), crowded, prefill("p", 9000)).reason == "itl"
    assert route("deflection", round_of(0, 5), crowded, prefill("p", 9000)).reason == "deflected"


def test_on_idle_workers_the_one_without_a_transfer_wins_and_of_equals_the_remote_one() -> None:
    assert route("deflection", round_of(3000, 50), decode(), prefill("p")).reason == "deflected"
    assert route("deflection", round_of(3000, 50), decode(), prefill("p"), model=FreeLinks()).route is Route.REMOTE


def test_remote_means_the_best_of_the_prefill_workers() -> None:
    decision = route("deflection", round_of(0, 500), decode(9000, batch=5), prefill("a", 400), prefill("b", 300, 50))
    assert decision.worker_id == "b"


def test_its_own_worker_is_no_prefill_worker_for_it() -> None:
    own = replace(decode(batch=20), role=Role.PREFILL)
    assert route("deflection", round_of(0, 50), own, own).reason == "no-prefill-worker"
    assert route("deflection", round_of(0, 50), own, own, prefill("p", 9000)).worker_id == "p"


def slices(task: PrefillTask, running: list[RunningRound]) -> Iterator[tuple[int, int]]:
    """(done before, tokens) as `itl-chunks` cuts it."""
    slicing, done = create("slicing", "itl-chunks"), 0
    while done < task.incr_tokens:
        left = replace(task, hist_tokens=task.hist_tokens + done, incr_tokens=task.incr_tokens - done)
        tokens = situations.slice(slicing, left, running, TP4, MODEL, 0.0)
        yield done, tokens
        done += tokens


@given(
    st.integers(0, 40_000),
    st.integers(1, 6000),
    st.lists(st.integers(1, 3000), max_size=3),
    st.integers(1, 64),
    st.integers(1, 20_000),
    st.floats(0.01, 0.2),
    st.integers(0, 40_000),
)
def test_what_is_deflected_is_executed_within_the_target_in_the_time_that_was_promised(
    hist: int, incr: int, ahead: list[int], batch: int, context: int, itl_s: float, remote_queue: int
) -> None:
    task = round_of(hist, incr, Slo(1.0, itl_s))
    own = WorkerView("d", Role.DECODE, TP4, queue_of(*ahead), decode_batch=batch, decode_context_tokens=batch * context)
    decision = route("deflection", task, own, replace(prefill("p", remote_queue), parallelism=TP4), model=MODEL)
    if decision.route is Route.REMOTE:
        return
    assert decision.reason == "deflected"
    here, there = decision.estimates
    assert here.total_s < there.total_s
    step_s = MODEL.decode_step_s(batch, batch * context, TP4)
    running = [RunningRound(5, 0.1, itl_s, context)] * batch
    total_s = 0.0
    for queued in (*own.queue, task):
        for done, tokens in slices(queued, running):
            slice_s = MODEL.prefill_s(queued.hist_tokens + done, tokens, TP4)
            assert slice_s + step_s <= itl_s + 1e-12
            total_s += slice_s + step_s
    assert total_s == pytest.approx(here.total_s)
