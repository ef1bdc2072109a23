"""TaiChi: short prefills stay on decode-heavy workers while TTFT allows it; chunks by role; overflow at a watermark."""

import random
from dataclasses import replace

import pytest
from ampd_rivals.taichi.chunks import ChunkSizes
from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.base import SlicingSituation
from ampd.policies.registry import create, create_named
from ampd.types import Parallelism, QueueRest, Role, Route, RouteDecision, WorkerView
from planner.simulator.options import Cluster, ReplicaGroup, SimulationOptions
from planner.simulator.simulate import simulate
from tests.ampd.policies import situations
from tests.ampd.policies.routing_lab import PLAIN, decode, prefill, round_of, route
from tests.planner.simulator.lab import AMPD, MODEL, SLO, session

# `PLAIN`: 10 ms a pass and 1 ms a token; a step of n sequences takes 5 + n ms. The TTFT target is 1 s.


def mixed(name: str, *queue: int, batch: int = 0) -> WorkerView:
    return replace(decode(*queue, batch=batch, name=name), role=Role.MIXED)


def chosen(decision: RouteDecision) -> tuple[str, str]:
    return decision.worker_id, decision.reason


def test_a_prefill_takes_its_chunks_and_a_step_after_each() -> None:
    sizes = ChunkSizes()
    assert sizes.prefill_s(decode(), 0, 512, PLAIN) == pytest.approx(2 * 0.266)
    assert sizes.prefill_s(decode(batch=3), 0, 513, PLAIN) == pytest.approx(3 * (0.266 + 0.008))
    assert sizes.prefill_s(mixed("m"), 0, 512, PLAIN) == pytest.approx(0.522)
    assert sizes.prefill_s(mixed("m"), 0, 0, PLAIN) == 0.0
    queued = replace(decode(256, 512), queue_rest=QueueRest(2, 0, 512))
    assert sizes.queued_s(queued, PLAIN) == pytest.approx(0.266 + 0.532 + 2 * 0.266)


def test_a_short_prefill_stays_on_the_slow_worker_although_another_is_faster() -> None:
    decision = route("taichi", round_of(0, 512), decode(), mixed("m"))
    assert chosen(decision) == ("d", "degraded")
    assert [(each.worker_id, each.total_s) for each in decision.estimates] == [
        ("d", pytest.approx(0.532)),
        ("m", pytest.approx(0.522)),
    ]


def test_what_the_slow_worker_cannot_do_in_time_goes_to_a_fast_one() -> None:
    # Four chunks of 266 ms are too long; one of 910 ms is not.
    assert chosen(route("taichi", round_of(0, 900), decode(), mixed("m"))) == ("m", "prefill-heavy")
    assert chosen(route("taichi", round_of(0, 512), decode(512), mixed("m"))) == ("m", "prefill-heavy")
    assert chosen(route("taichi", round_of(0, 512), decode(), mixed("m"), now_s=0.475)) == ("m", "prefill-heavy")
    assert chosen(route("taichi", round_of(0, 512), decode(batch=300), prefill("p"))) == ("p", "prefill-heavy")


def test_of_the_fast_ones_the_earliest_with_the_transfer_of_the_history() -> None:
    # 50 000 tokens of history take 500 ms to the worker that holds none of them.
    task = round_of(50_000, 480)
    holder = replace(mixed("holder", 300), held_tokens={"s": 50_000})
    assert chosen(route("taichi", task, decode(512), mixed("m"), holder)) == ("holder", "prefill-heavy")
    assert chosen(route("taichi", task, decode(512), mixed("m"), mixed("holder", 300))) == ("m", "prefill-heavy")


def test_where_none_is_in_time_the_earliest_of_all() -> None:
    assert chosen(route("taichi", round_of(0, 1100), decode(), mixed("m"))) == ("m", "late")
    assert chosen(route("taichi", round_of(0, 1100), decode(), mixed("m", 400))) == ("d", "late")


def test_a_session_of_a_fast_worker_is_local_where_that_is_earliest() -> None:
    own = mixed("own")
    decision = route("taichi", round_of(400, 500), own, mixed("m"))
    assert (decision.route, *chosen(decision)) == (Route.LOCAL, "own", "prefill-heavy")
    assert chosen(route("taichi", round_of(400, 500), mixed("own", 300), mixed("m"))) == ("m", "prefill-heavy")


def test_without_another_worker_that_can_take_the_prompt_it_is_local() -> None:
    assert chosen(route("taichi", round_of(0, 2000), decode())) == ("d", "no-prefill-worker")
    small = prefill("p", max_context=1000)
    assert chosen(route("taichi", round_of(0, 2000), decode(), small)) == ("d", "no-prefill-worker")


@given(st.integers(0, 5000), st.integers(1, 5000), st.lists(st.integers(1, 3000), max_size=3), st.integers(0, 200))
def test_the_choice_is_among_the_workers_and_its_estimate_is_recorded(
    hist: int, incr: int, queue: list[int], batch: int
) -> None:
    workers = [mixed("m", *queue), prefill("p")]
    decision = route("taichi", round_of(hist, incr), decode(*queue, batch=batch), *workers)
    (made,) = [each for each in decision.estimates if each.worker_id == decision.worker_id]
    assert made.route is decision.route
    assert (decision.route is Route.LOCAL) == (decision.worker_id == "d")
    if decision.reason != "late":
        assert made.total_s <= 1.0
    else:
        assert made.total_s == min(each.total_s for each in decision.estimates)


def holding(name: str, role: Role, used: int, capacity: int = 1000) -> WorkerView:
    return WorkerView(name, role, kv_used_tokens=used, kv_capacity_tokens=capacity)


def bind(*workers: WorkerView, tokens: int = 100, policy: str = "taichi") -> str:
    task = round_of(0, tokens)
    return situations.bind(create_named("binding", policy), task, workers, PLAIN, 0.0, random.Random(0))


def test_sessions_begin_on_decode_heavy_workers_up_to_the_watermark() -> None:
    d1, m = holding("d1", Role.DECODE, 850), holding("m", Role.MIXED, 0)
    assert bind(d1, m) == "d1"
    assert bind(d1, holding("d2", Role.DECODE, 800), m) == "d2"
    assert bind(d1, holding("d2", Role.DECODE, 1700, 2000), m) == "d2", "shares count, not tokens"
    assert bind(replace(d1, kv_used_tokens=851), m) == "m"
    assert bind(d1, m, holding("m2", Role.MIXED, 1, 0)) == "d1"
    assert bind(replace(d1, kv_used_tokens=990), holding("d2", Role.DECODE, 980)) == "d2"
    stored = replace(d1, kv_used_tokens=990, store_used_tokens=0, store_capacity_tokens=5000)
    assert bind(stored, m) == "d1"


@pytest.mark.parametrize(("role", "tokens"), [(Role.DECODE, 256), (Role.MIXED, 2048), (Role.PREFILL, 2048)])
def test_chunks_are_cut_by_the_role(role: Role, tokens: int) -> None:
    policy = create("slicing", "taichi")
    for incr in (tokens - 1, tokens, tokens + 1):
        asked = SlicingSituation(
            model=PLAIN, now_s=0.0, task=round_of(0, incr), running=(), parallelism=Parallelism(), role=role
        )
        assert policy.slice(asked) == min(incr, tokens)


def test_a_chunk_may_share_its_pass_with_a_step() -> None:
    policy = create_named("slicing", "taichi(decode_heavy_tokens=96)")
    assert situations.slice(policy, round_of(100, 400), [], Parallelism(), PLAIN, 0.0) == 96


def test_a_cluster_of_both_kinds_serves_all_rounds_and_cuts_by_the_role_of_the_time() -> None:
    group = ReplicaGroup(1, Parallelism(1), 60_000)
    policies = replace(
        AMPD,
        binding=create("binding", "taichi"),
        routing=create("routing", "taichi"),
        ordering=create("ordering", "fcfs"),
        slicing=create("slicing", "taichi"),
    )
    sessions = [session(f"s{number}", (3000, 30), (400, 30), arrival_s=0.6 * number) for number in range(12)]
    done = simulate(
        sessions, Cluster((group,), mixed=(group,)), MODEL, policies, SLO, SimulationOptions(keeps_timeline=True)
    )
    assert all(record.error is None for record in done.rounds)
    assert {record.reason for record in done.rounds} >= {"degraded", "prefill-heavy"}
    longest = {
        worker_id: max(
            span.detail["tokens"] for span in done.timeline if (span.worker_id, span.kind) == (worker_id, "prefill")
        )
        for worker_id in done.worker_roles
    }
    assert longest["decode-0"] <= 256 < longest["mixed-0"] <= 2048
