"""Where a round goes: history, limits, and the workers that the policies may choose from."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from ampd.perf.presets import load_performance_model
from ampd.policies import registry
from ampd.policies.base import BindingSituation, RoutingPolicy, RoutingSituation
from ampd.serving.placement import (
    ContextTooLongError,
    Moving,
    PlacementPolicies,
    Plan,
    PlanSituation,
    deterministic_choice,
    prefill_task,
    with_room,
)
from ampd.types import Parallelism, PrefillTask, Role, Route, RouteDecision, Slo, WorkerView
from tests.ampd.policies.routing_lab import PlainModel, queue_of

MODEL = load_performance_model("tiny-cpu")
SLO = Slo(1.0, 0.1)
DECODE = WorkerView("d", Role.DECODE)
PREFILL = [WorkerView(name, Role.PREFILL) for name in ("p1", "p2")]


class Last:
    """Binds to the last worker and routes to the last prefill worker; keeps the workers that it saw."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.offers: list[dict[str, Any] | None] = []

    def bind(self, situation: BindingSituation) -> str:
        return self._last(situation.decode)

    def route(self, situation: RoutingSituation) -> RouteDecision:
        self.offers.append(situation.offers)
        return RouteDecision(Route.REMOTE, self._last(situation.prefill or [situation.decode]), "last")

    def _last(self, workers: Sequence[WorkerView]) -> str:
        self.seen.append([view.worker_id for view in workers])
        return workers[-1].worker_id


class Elsewhere:
    """Binds to a worker that it was not offered."""

    def bind(self, _situation: BindingSituation) -> str:
        return DECODE.worker_id


def policies() -> tuple[Last, PlacementPolicies]:
    last = Last()
    return last, PlacementPolicies(last, last, MODEL, random.Random(1))


def task(prompt_tokens: int = 100, held_tokens: int = 0) -> PrefillTask:
    return prefill_task("t", "s", prompt_tokens, held_tokens, arrival_s=3.0, slo=SLO, session_missed=True)


def situation(
    decode: WorkerView,
    shared: Mapping[str, int] | None = None,
    prefill: Sequence[WorkerView] = PREFILL,
    moving: Moving | None = None,
) -> PlanSituation:
    """A round of 100 tokens, of which the owner holds 40 of the session."""

    def shared_tokens(workers: Sequence[WorkerView]) -> dict[str, int]:
        held = shared or {}
        return {view.worker_id: held[view.worker_id] for view in workers if view.worker_id in held}

    return PlanSituation(
        task=task(held_tokens=40), decode=decode, prefill=prefill, now_s=3.0, shared_tokens=shared_tokens, moving=moving
    )


@given(prompt=st.integers(1, 1000), held=st.integers(0, 1200))
def test_at_least_one_token_is_computed(prompt: int, held: int) -> None:
    made = task(prompt, held)
    assert made == PrefillTask("t", "s", made.hist_tokens, made.incr_tokens, 3.0, SLO, session_missed=True)
    assert made.context_tokens == prompt
    assert made.incr_tokens >= 1
    assert made.hist_tokens == (held if held < prompt else prompt - 1)


def limited(*limits_tokens: int) -> list[WorkerView]:
    return [WorkerView(f"d{limit}", Role.DECODE, max_context_tokens=limit) for limit in limits_tokens]


@pytest.mark.parametrize(("tokens", "limit", "expected"), [(10, 10, True), (11, 10, False), (10**9, 0, True)])
def test_a_limit_of_zero_is_none(tokens: int, limit: int, expected: bool) -> None:
    largest = limited(10**10)
    assert with_room(tokens, limited(limit) + largest) == (limited(limit) if expected else []) + largest


def test_the_largest_limit_is_named_if_a_context_fits_no_worker() -> None:
    with pytest.raises(ContextTooLongError) as caught:
        with_room(11, limited(10, 5))
    assert caught.value.limit_tokens == 10
    assert with_room(10, limited(10, 5)) == limited(10)
    assert with_room(11, limited(10, 0)) == limited(0)


def test_a_session_is_bound_to_a_worker_of_those_offered() -> None:
    last, placement = policies()
    assert placement.bind(task(), [DECODE, WorkerView("d2", Role.DECODE)], 5.0) == "d2"
    assert last.seen == [["d", "d2"]]


def test_a_binding_to_an_unknown_worker_is_named() -> None:
    _, placement = policies()
    with pytest.raises(UserError, match="chose 'd', which is not among the decode workers"):
        PlacementPolicies(Elsewhere(), Last(), MODEL, random.Random(1)).bind(task(), PREFILL, 0.0)
    assert placement.bind(task(), [DECODE], 0.0) == "d"


def test_lost_workers_and_the_session_s_own_are_no_prefill_workers() -> None:
    last, placement = policies()
    assert placement.route(task(), DECODE, PREFILL, 5.0).worker_id == "p2"
    assert placement.route(task(), DECODE, PREFILL, 5.0, lost={"p2"}).worker_id == "p1"
    turned = WorkerView("p2", Role.PREFILL)
    assert placement.route(task(), turned, PREFILL, 5.0).worker_id == "p1"
    placement.route(task(), turned, PREFILL, 5.0, lost=["p1"])
    assert last.seen == [["p1", "p2"], ["p1"], ["p1"], ["p2"]], "the last answer is the decode worker itself"


def test_a_prompt_that_does_not_fit_at_the_chosen_worker_is_local() -> None:
    _, placement = policies()
    small = WorkerView("p3", Role.PREFILL, max_context_tokens=100)
    assert placement.route(task(99), DECODE, [*PREFILL, small], 5.0).worker_id == "p3"
    expected = RouteDecision(Route.LOCAL, "d", "prefill-worker-refused")
    assert placement.route(task(100), DECODE, [*PREFILL, small], 5.0) == expected
    assert placement.route(task(100), DECODE, [small, *PREFILL], 5.0).worker_id == "p2"


@pytest.mark.parametrize(("limit", "owner"), [(100, None), (101, "d2"), (0, "d2")])
def test_a_session_moves_only_to_an_owner_with_room_for_it(limit: int, owner: str | None) -> None:
    _, placement = policies()
    owners = [WorkerView("d2", Role.DECODE, max_context_tokens=limit)]
    plan = placement.plan(situation(WorkerView("p1", Role.PREFILL), moving=Moving("needed", lambda: owners, 101)))
    assert (plan.decode.worker_id if plan.move_reason else None) == owner


@pytest.mark.parametrize(
    ("shared", "hist_tokens", "shared_tokens", "source"),
    [
        ({}, 40, 0, "d"),
        ({"d": 64}, 64, 0, "d"),
        ({"p2": 32}, 40, 32, "d"),
        ({"p2": 48}, 48, 48, None),
        ({"p1": 96}, 40, 0, "d"),
        ({"d": 64, "p2": 200}, 99, 200, None),
    ],
)
def test_a_plan_counts_what_the_owner_and_the_prefill_worker_hold_for_other_sessions(
    shared: dict[str, int], hist_tokens: int, shared_tokens: int, source: str | None
) -> None:
    _, placement = policies()
    plan = placement.plan(situation(DECODE, shared))
    assert (plan.decision.worker_id, plan.task.hist_tokens, plan.shared_tokens) == ("p2", hist_tokens, shared_tokens)
    assert (plan.source.worker_id if plan.source else None) == source


def test_a_session_that_moves_reads_its_history_from_the_owner_before() -> None:
    last, placement = policies()
    turned, owners = WorkerView("p2", Role.PREFILL), [WorkerView("d2", Role.DECODE)]
    plan = placement.plan(situation(turned, prefill=[PREFILL[0]], moving=Moving("needed", lambda: owners, 101)))
    assert (plan.decode.worker_id, plan.decision.worker_id, plan.move_reason) == ("d2", "p1", "role")
    assert plan.holder is plan.source is turned
    # The owner before prefills for the session that has left it: the history is there.
    plan = placement.plan(
        situation(turned, prefill=[*PREFILL[:1], turned], moving=Moving("needed", lambda: owners, 101))
    )
    assert (plan.decision.worker_id, plan.holder, plan.source) == ("p2", turned, None)
    assert last.seen == [["p1"], ["p1"], ["p1"], ["p1", "p2"]]


class CountsReads(PlainModel):
    """Counts the reads of KV that it is asked about, by the parallelism of the reader."""

    def __init__(self) -> None:
        self.asked = Counter[Parallelism]()

    def kv_transfer_s(self, tokens: int, source: Parallelism, target: Parallelism) -> float:
        self.asked[target] += 1
        return super().kv_transfer_s(tokens, source, target)


def test_a_prefill_worker_is_predicted_once_for_all_owners() -> None:
    """Their own queues let the new owners be tried, and no prefill worker would be in time."""
    model = CountsReads()
    full = WorkerView("d", Role.DECODE, Parallelism(4), kv_used_tokens=1000, kv_capacity_tokens=1000)
    owners = [replace(full, worker_id=name, kv_used_tokens=0) for name in ("d2", "d3", "d4")]
    prefill = [WorkerView(f"p{number}", Role.PREFILL, Parallelism(2), queue=queue_of(3000)) for number in range(5)]
    placement = PlacementPolicies(Last(), registry.create("routing", "predictive"), model, random.Random(1))
    busy = [replace(owner, queue=queue_of(900)) for owner in owners]
    plan = placement.plan(situation(full, prefill=prefill, moving=Moving("needed", lambda: busy, 101)))
    assert plan.move_reason == ""
    assert model.asked[Parallelism(2)] == len(prefill)
    assert model.asked[Parallelism(4)] > 0, "new owners were tried"


@pytest.mark.parametrize(("holder", "is_kept"), [(None, True), ("p1", True), ("p2", False)])
def test_predictions_are_kept_if_the_history_is_read_from_the_same_worker(holder: str | None, is_kept: bool) -> None:
    last, placement = policies()
    turned, *others = PREFILL
    held = {view.worker_id: view for view in PREFILL}.get(holder or "")
    moving = Moving("needed", lambda: [DECODE], 101)
    placement.plan(replace(situation(turned, prefill=others, moving=moving), holder=held))
    first, second = last.offers
    assert (first is second) is is_kept


class Forgets:
    """A routing policy that predicts everything for every owner again."""

    def __init__(self) -> None:
        self._policy: RoutingPolicy = registry.create("routing", "predictive")

    def route(self, situation: RoutingSituation) -> RouteDecision:
        return self._policy.route(replace(situation, offers={}))


@st.composite
def loaded(draw: st.DrawFn, role: Role, name: str) -> WorkerView:
    batch = draw(st.integers(0, 60))
    return WorkerView(
        name,
        role,
        Parallelism(draw(st.sampled_from([2, 4]))),
        queue_of(*draw(st.lists(st.integers(1, 9000), max_size=9))),
        decode_batch=batch,
        decode_context_tokens=4000 * batch,
        kv_used_tokens=draw(st.sampled_from([0, 100_000])),
        kv_capacity_tokens=100_000,
        held_tokens={"s": draw(st.sampled_from([0, 5000, 20_000]))},
    )


@given(st.data())
def test_what_is_known_of_the_prefill_workers_changes_no_plan(data: st.DataObject) -> None:
    model = load_performance_model("qwen3-32b-h20")
    roles = data.draw(st.lists(st.sampled_from(Role), min_size=2, max_size=8))
    workers = [data.draw(loaded(role, f"w{number}")) for number, role in enumerate(roles)]
    decode, owners = workers[0], [view for view in workers if view.role.owns_sessions]
    asked = PlanSituation(
        task=PrefillTask("t", "s", data.draw(st.integers(0, 20_000)), data.draw(st.integers(1, 5000)), 3.0, SLO),
        decode=decode,
        prefill=[view for view in workers if view.role is not Role.DECODE],
        now_s=3.0,
        shared_tokens=lambda views: {view.worker_id: 64 for view in views if view.worker_id in ("w1", "w3")},
        holder=data.draw(st.sampled_from([None, *workers])),
        moving=Moving(data.draw(st.sampled_from(["needed", "any"])), lambda: owners, 101),
    )

    def plan(routing: RoutingPolicy) -> Plan:
        return PlacementPolicies(Last(), routing, model, random.Random(1)).plan(asked)

    assert plan(registry.create("routing", "predictive")) == plan(Forgets())


def test_a_session_stays_without_a_way_to_move() -> None:
    _, placement = policies()
    plan = placement.plan(situation(WorkerView("p2", Role.PREFILL)))
    assert (plan.decode.worker_id, plan.holder, plan.move_reason) == ("p2", None, "")


def test_a_worker_of_an_unknown_parallelism_is_left_out_only_if_that_is_wanted() -> None:
    predictive = registry.create("routing", "predictive")
    odd = WorkerView("p3", Role.PREFILL, Parallelism(7))
    strict = PlacementPolicies(Last(), predictive, MODEL, random.Random(1))
    with pytest.raises(UserError, match="no times for tp 7"):
        strict.route(task(), DECODE, [*PREFILL, odd], 5.0)
    left_out: list[UserError] = []
    lenient = PlacementPolicies(Last(), predictive, MODEL, random.Random(1), left_out.append)
    assert lenient.route(task(), DECODE, [*PREFILL, odd], 5.0).worker_id != "p3"
    odd_decode = replace(DECODE, parallelism=Parallelism(7))
    assert lenient.route(task(), odd_decode, [*PREFILL, odd], 5.0).reason == "no-performance-model"
    assert len(left_out) == 2


def test_a_round_that_must_be_local_is_not_shown_to_the_policy() -> None:
    last, placement = policies()
    decision = placement.route(task(), DECODE, PREFILL, 5.0, local_only="cannot-carry-logprobs")
    assert decision == RouteDecision(Route.LOCAL, "d", "cannot-carry-logprobs")
    assert not last.seen


@given(st.text(max_size=8), st.permutations(["a", "b", "c", "d"]))
def test_every_replica_chooses_the_same_worker(session_id: str, names: list[str]) -> None:
    workers = {name: WorkerView(name, Role.DECODE) for name in names}
    chosen = deterministic_choice(session_id, list(workers.values()))
    assert chosen == deterministic_choice(session_id, [workers[name] for name in sorted(names)])
    rest = [view for view in workers.values() if view != chosen]
    # A worker that goes moves its own sessions only.
    assert deterministic_choice(session_id, [chosen, *rest[1:]]) == chosen
