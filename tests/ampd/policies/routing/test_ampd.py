import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.registry import ROUTING, create
from ampd.types import Parallelism, PrefillTask, Role, Route, RouteDecision, Slo, Window, WorkerView
from tests.ampd.policies import situations

MODEL = load_performance_model("qwen3-32b-h20")
SLO = Slo(ttft_s=1.0, itl_s=0.04)
TASK = PrefillTask("t", "s", hist_tokens=8000, incr_tokens=400, arrival_s=0.0, slo=SLO)
TP2, TP4 = Parallelism(2), Parallelism(4)
BUSY = Window(100.0, 5)


def queued(*incr_tokens: int) -> tuple[PrefillTask, ...]:
    return tuple(PrefillTask(f"q{i}", f"other{i}", 1000, incr, 0.0, SLO) for i, incr in enumerate(incr_tokens))


def prefill(name: str, ttft: Window = BUSY, parallelism: Parallelism = TP4, queue: tuple[int, ...] = ()) -> WorkerView:
    return WorkerView(name, Role.PREFILL, parallelism, queued(*queue), ttft=ttft)


DECODE = WorkerView("d", Role.DECODE, TP2, itl=BUSY)


def route(
    *workers: WorkerView, policy: str = "ampd", decode: WorkerView = DECODE, seed: int = 0, task: PrefillTask = TASK
) -> RouteDecision:
    return situations.route(create("routing", policy), task, decode, workers, MODEL, 0.0, random.Random(seed))


@pytest.mark.parametrize("policy", ROUTING.names())
def test_without_a_prefill_worker_everything_is_local(policy: str) -> None:
    assert route(policy=policy) == RouteDecision(Route.LOCAL, "d", "no-prefill-worker")


@pytest.mark.parametrize("policy", ROUTING.names())
def test_a_prefill_worker_with_too_short_a_context_is_none(policy: str) -> None:
    short = replace(prefill("p", Window()), max_context_tokens=8400)
    assert route(short, policy=policy).reason == "no-prefill-worker"
    assert route(replace(short, max_context_tokens=8401), policy=policy).reason != "no-prefill-worker"


def test_the_first_prefill_worker_with_ttft_slack_takes_it() -> None:
    assert route(prefill("slow"), prefill("fast", Window(0.9, 3))) == RouteDecision(Route.REMOTE, "fast", "ttft-slack")


def test_slack_ends_just_above_alpha_times_the_target() -> None:
    assert route(prefill("p", Window(0.9000001, 3))).reason == "cheapest"


def test_an_empty_window_counts_as_unloaded() -> None:
    assert route(prefill("p", Window(100.0, 0))).reason == "ttft-slack"
    assert route(prefill("p"), decode=replace(DECODE, itl=Window(100.0, 0))).reason == "itl-slack"


def test_workers_with_slack_are_equally_likely_and_the_seed_decides() -> None:
    workers = [prefill("slow"), *(prefill(name, Window(0.1, 1)) for name in "abc")]
    chosen = Counter(route(*workers, seed=seed).worker_id for seed in range(900))
    assert chosen.keys() == set("abc")
    assert min(chosen.values()) > 240
    assert route(*workers, seed=5) == route(*workers, seed=5)


def test_then_a_decode_worker_with_itl_slack_prefills_itself() -> None:
    assert route(prefill("p"), decode=replace(DECODE, itl=Window(0.034, 9))) == RouteDecision(
        Route.LOCAL, "d", "itl-slack"
    )
    assert route(prefill("p"), decode=replace(DECODE, itl=Window(0.0340001, 9))).reason == "cheapest"


def test_estimates_are_the_papers_sums() -> None:
    decode = replace(DECODE, queue=queued(700, 80))
    worker = prefill("p", queue=(300, 5000))
    here, there = route(worker, decode=decode).estimates
    assert (here.route, here.worker_id, there.route, there.worker_id) == (Route.LOCAL, "d", Route.REMOTE, "p")
    assert here.prefill_s == MODEL.prefill_s(8000, 400, TP2)
    assert here.queue_s == pytest.approx(MODEL.prefill_s(1000, 700, TP2) + MODEL.prefill_s(1000, 80, TP2))
    assert here.transfer_s == 0
    assert here.total_s == pytest.approx(here.prefill_s + here.queue_s)
    assert there.prefill_s == MODEL.prefill_s(8000, 400, TP4)
    assert there.queue_s == pytest.approx(MODEL.prefill_s(1000, 300, TP4) + MODEL.prefill_s(1000, 5000, TP4))
    assert there.transfer_s == pytest.approx(MODEL.kv_transfer_s(8000, TP2, TP4) + MODEL.kv_transfer_s(400, TP4, TP2))
    assert there.total_s == pytest.approx(there.prefill_s + there.queue_s + there.transfer_s)


@pytest.mark.parametrize(("held", "moved"), [(0, 8000), (3000, 5000), (8000, 0), (9000, 0)])
def test_history_that_the_prefill_worker_holds_is_not_moved(held: int, moved: int) -> None:
    worker = replace(prefill("p"), held_tokens={"s": held, "other": 77})
    expected = MODEL.kv_transfer_s(moved, TP2, TP4) + MODEL.kv_transfer_s(400, TP4, TP2)
    assert route(worker).estimates[1].transfer_s == pytest.approx(expected)


def test_of_equal_routes_local_comes_first_and_prefill_workers_share() -> None:
    nothing = replace(TASK, hist_tokens=0, incr_tokens=0)
    assert route(prefill("p"), task=nothing).route is Route.LOCAL
    busy = replace(DECODE, queue=queued(*[4000] * 20))
    chosen = {route(prefill("a"), prefill("b"), decode=busy, seed=seed).worker_id for seed in range(40)}
    assert chosen == {"a", "b"}


lengths = st.lists(st.integers(1, 20000), max_size=6).map(tuple)


@given(st.lists(lengths, min_size=1, max_size=5), lengths, st.integers(0, 50000), st.integers(1, 20000), st.integers())
def test_cheapest_is_never_dearer_than_any_other_route(
    queues: list[tuple[int, ...]], own: tuple[int, ...], hist: int, incr: int, seed: int
) -> None:
    workers = [prefill(f"p{i}", queue=queue) for i, queue in enumerate(queues)]
    task = replace(TASK, hist_tokens=hist, incr_tokens=incr)
    decision = route(*workers, decode=replace(DECODE, queue=queued(*own)), task=task, seed=seed)
    assert decision.reason == "cheapest"
    assert [estimate.worker_id for estimate in decision.estimates] == ["d", *(worker.worker_id for worker in workers)]
    chosen = next(estimate for estimate in decision.estimates if estimate.worker_id == decision.worker_id)
    assert chosen.route is decision.route
    assert chosen.total_s == min(estimate.total_s for estimate in decision.estimates)


def test_always_remote_takes_the_least_queued_work_not_the_shortest_queue() -> None:
    workers = (prefill("one-long", Window(), queue=(9000,)), prefill("three-short", Window(), queue=(50, 60, 70)))
    decision = route(*workers, policy="always-remote")
    assert (decision.route, decision.worker_id, decision.reason) == (Route.REMOTE, "three-short", "always-remote")
    assert [estimate.worker_id for estimate in decision.estimates] == ["one-long", "three-short"]


def test_always_local_never_leaves() -> None:
    assert route(prefill("p", Window()), policy="always-local") == RouteDecision(Route.LOCAL, "d", "always-local")
