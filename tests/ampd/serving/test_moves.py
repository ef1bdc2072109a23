"""When a session moves to another owner, and when it stays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import analytic_model
from ampd.serving.moves import REST_S, Move, MoveSituation, drops_history, due_move, may_move
from ampd.types import Moves, Parallelism, PrefillTask, Role, Route, RouteDecision, RouteEstimate, Slo, WorkerView

MODEL = analytic_model("qwen3-32b", "h20")
SLO = Slo(1.0, 0.04)
NOW_S = 100.0
TASK = PrefillTask("t", "s", 4000, 500, NOW_S, SLO)
SIZES: dict[str, Any] = {"kv_capacity_tokens": 200_000, "max_context_tokens": 200_000}
OWNER = WorkerView("a", Role.DECODE, Parallelism(4), kv_used_tokens=20_000, held_tokens={"s": 4000}, **SIZES)
OTHER = WorkerView("b", Role.DECODE, Parallelism(4), kv_used_tokens=10_000, **SIZES)
CROWDED: dict[str, Any] = {"decode_batch": 200, "decode_context_tokens": 1_200_000}


def local(worker: WorkerView, total_s: float = 0.1) -> RouteDecision:
    estimate = RouteEstimate(Route.LOCAL, worker.worker_id, total_s, total_s, 0.0, 0.0)
    return RouteDecision(Route.LOCAL, worker.worker_id, "test", (estimate,))


def due(
    owner: WorkerView = OWNER,
    others: Sequence[WorkerView] = (OTHER,),
    stay_s: float = 0.1,
    move_s: float = 0.2,
    moved_s: float = -math.inf,
    task: PrefillTask = TASK,
    shared_tokens: Mapping[str, int] | None = None,
    moves: Moves = "any",
) -> Move | None:
    return due_move(
        MoveSituation(
            model=MODEL,
            now_s=NOW_S,
            task=task,
            owner=owner,
            stay=local(owner, stay_s),
            others=others,
            moved_s=moved_s,
            route=lambda worker: local(worker, move_s),
            shared_tokens=shared_tokens or {},
            moves=moves,
        )
    )


def reason(move: Move | None) -> str | None:
    return move.reason if move else None


def test_a_session_stays_where_it_is_served_in_time() -> None:
    assert due() is None
    assert due(others=(), stay_s=9.0) is None


@pytest.mark.parametrize(
    ("owner", "stay_s", "why"),
    [
        (replace(OWNER, role=Role.PREFILL), 0.1, "role"),
        (replace(OWNER, **CROWDED), 0.1, "itl"),
        (OWNER, 1.1, "ttft"),
        (replace(OWNER, kv_used_tokens=199_900), 0.1, "memory"),
        (replace(OWNER, store_used_tokens=399_900, store_capacity_tokens=400_000), 0.1, "memory"),
    ],
)
def test_it_moves_for_each_reason(owner: WorkerView, stay_s: float, why: str) -> None:
    move = due(owner, stay_s=stay_s)
    assert move is not None
    assert (move.reason, move.owner, move.decision.worker_id) == (why, OTHER, "b")
    assert due(owner, stay_s=stay_s, moved_s=NOW_S - REST_S / 2) is None, "it has just moved"
    assert reason(due(owner, stay_s=stay_s, moved_s=NOW_S - REST_S)) == why


@pytest.mark.parametrize("why", ["itl", "ttft", "memory", "role"])
@pytest.mark.parametrize(
    "other",
    [replace(OTHER, **CROWDED), replace(OTHER, kv_used_tokens=196_000)],
    ids=["slow batch", "full memory"],
)
def test_it_stays_if_no_other_worker_is_better(other: WorkerView, why: str) -> None:
    owners = {
        "itl": replace(OWNER, **CROWDED),
        "ttft": OWNER,
        "memory": replace(OWNER, kv_used_tokens=199_900),
        "role": replace(OWNER, role=Role.PREFILL),
    }
    assert due(owners[why], (other,), stay_s=1.1 if why == "ttft" else 0.1) is None
    assert reason(due(owners[why], (other, OTHER), stay_s=1.1 if why == "ttft" else 0.1)) == why


@pytest.mark.parametrize(("moves", "why"), [("any", "itl"), ("needed", "memory")])
def test_only_some_sessions_leave_a_slow_batch(moves: Moves, why: str) -> None:
    full = replace(OWNER, **{**CROWDED, "kv_used_tokens": 199_900})
    assert reason(due(full, moves=moves)) == why
    assert reason(due(replace(OWNER, **CROWDED), moves=moves)) == ("itl" if moves == "any" else None)
    assert reason(due(stay_s=1.1, moves=moves)) == ("ttft" if moves == "any" else None)


def test_a_session_leaves_a_full_memory_only_if_an_eviction_costs_more_than_the_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the owner would evict is computed again. The session's own history is read."""
    full = replace(OWNER, kv_used_tokens=199_900)
    prefill_s = MODEL.prefill_s(0, TASK.hist_tokens, OTHER.parallelism)
    monkeypatch.setattr(PiecewiseModel, "kv_transfer_s", lambda *_: 0.9 * prefill_s)
    assert reason(due(full)) == "memory"
    monkeypatch.setattr(PiecewiseModel, "kv_transfer_s", lambda *_: 1.1 * prefill_s)
    assert due(full) is None
    assert reason(due(full, task=replace(TASK, hist_tokens=0))) == "memory", "nothing has to be read"


def test_who_may_move() -> None:
    full, turned = replace(OWNER, kv_used_tokens=199_900), replace(OWNER, role=Role.PREFILL)
    owners = [OWNER, replace(OWNER, role=Role.MIXED), full, turned]
    assert [may_move("needed", owner, 500) for owner in owners] == [False, False, True, True]
    assert all(may_move("any", owner, 500) and not may_move("never", owner, 500) for owner in owners)


def test_a_move_must_meet_the_target_that_it_is_made_for() -> None:
    assert due(stay_s=1.5, move_s=0.95) is None
    assert reason(due(stay_s=1.5, move_s=0.85)) == "ttft"
    assert due(replace(OWNER, **CROWDED), move_s=1.2) is None


def test_a_prefix_that_the_new_owner_holds_for_others_needs_no_more_memory() -> None:
    nearly_full = replace(OTHER, kv_used_tokens=178_000)
    assert due(stay_s=1.1, others=(nearly_full,)) is None
    assert due(stay_s=1.1, others=(nearly_full,), shared_tokens={"a": 4000}) is None
    assert reason(due(stay_s=1.1, others=(nearly_full,), shared_tokens={"b": 4000})) == "ttft"


def test_a_late_round_leaves_a_prefill_worker_if_it_gets_no_later() -> None:
    turned = replace(OWNER, role=Role.PREFILL)
    assert reason(due(turned, stay_s=3.0, move_s=3.0)) == "role"
    assert due(turned, stay_s=3.0, move_s=3.1) is None


def test_two_equal_owners_do_not_exchange_sessions() -> None:
    """Whatever load both have: where one is bad enough to leave, the other is too bad to come to."""
    for batch in range(1, 300, 7):
        for used_tokens in range(10_000, 200_000, 19_000):
            load: dict[str, Any] = {
                "decode_batch": batch,
                "decode_context_tokens": batch * 5000,
                "kv_used_tokens": used_tokens,
            }
            assert reason(due(replace(OWNER, **load), (replace(OTHER, **load),))) is None


def test_the_read_of_the_whole_context_after_a_remote_prefill_counts_in_the_itl() -> None:
    """A round of usual length would miss its ITL target, because a context of 150,000 tokens takes 0.5 s to read."""
    turned, long = replace(OWNER, role=Role.PREFILL), replace(TASK, hist_tokens=150_000)

    def moved(task: PrefillTask, route: Route) -> Move | None:
        def decision(_: WorkerView) -> RouteDecision:
            return RouteDecision(route, "b" if route is Route.LOCAL else "p", "test", ())

        stay = local(turned)
        return due_move(
            MoveSituation(
                model=MODEL,
                now_s=NOW_S,
                task=replace(task, slo=Slo(10.0, 0.016)),
                owner=turned,
                stay=stay,
                others=(OTHER,),
                moved_s=-math.inf,
                moves="any",
                route=decision,
            )
        )

    assert moved(TASK, Route.REMOTE)
    assert moved(long, Route.REMOTE) is None
    assert moved(long, Route.LOCAL)


def test_a_local_route_without_a_prediction_is_predicted_here() -> None:
    """Without a prefill worker, policies choose the local route without a prediction."""
    queue = tuple(replace(TASK, task_id=str(number), incr_tokens=8000, hist_tokens=0) for number in range(6))

    def bare(worker: WorkerView) -> RouteDecision:
        return RouteDecision(Route.LOCAL, worker.worker_id, "no-prefill-worker")

    def moved(owner: WorkerView, other: WorkerView) -> str | None:
        return reason(
            due_move(
                MoveSituation(
                    model=MODEL,
                    now_s=NOW_S,
                    task=TASK,
                    owner=owner,
                    stay=bare(owner),
                    others=(other,),
                    moved_s=-math.inf,
                    moves="any",
                    route=bare,
                )
            )
        )

    assert moved(OWNER, OTHER) is None
    assert moved(replace(OWNER, queue=queue), OTHER) == "ttft"
    assert moved(replace(OWNER, queue=queue), replace(OTHER, queue=queue)) is None


@pytest.mark.parametrize(
    ("owner", "prefill", "drops"), [("d2", "d2", True), ("d2", "p1", True), ("d2", "d1", False), ("d1", "p1", False)]
)
def test_the_owner_before_drops_what_it_has_no_more_use_for(owner: str, prefill: str, drops: bool) -> None:
    assert drops_history("d1", owner, prefill) is drops
