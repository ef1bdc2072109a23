"""What clients read of a round: the last placement, and the measurements of both workers."""

from __future__ import annotations

from typing import Any

from ampd.serving.placement import Plan
from ampd.state.store import Binding
from ampd.types import PrefillTask, Role, Route, RouteDecision, Slo, WorkerView
from router.decision_record import DecisionRecord

OWNER = WorkerView("d", Role.DECODE)
TASK = PrefillTask("t", "s", 32, 16, 0.0, Slo(1.0, 0.1))


def placed(record: DecisionRecord, worker: str, reason: str, move_reason: str = "") -> None:
    route = Route.LOCAL if worker == "d" else Route.REMOTE
    plan = Plan(OWNER, RouteDecision(route, worker, reason), TASK, move_reason=move_reason, shared_tokens=8)
    record.placed(plan, Binding("s", "d", 3))


def report(**more: Any) -> Any:
    return {
        "held_tokens": 48,
        "cached_tokens": 32,
        "queued_s": 0.1,
        "prefill_s": 0.2,
        "kv_read_tokens": 16,
        "kv_read_bytes": 1600,
        "kv_read_s": 0.05,
    } | more


def test_a_later_placement_replaces_the_first_and_keeps_why_the_session_moved() -> None:
    record = DecisionRecord("s", "ampd", Slo(1.0, 0.1))
    placed(record, "p", "ttft-slack", move_reason="role")
    placed(record, "d", "no-prefill-worker")
    told = record.as_dict()
    assert (told["route"], told["reason"], told["prefill_worker"]) == ("local", "no-prefill-worker", None)
    assert (told["move_reason"], told["decode_worker"], told["epoch"]) == ("role", "d", 3)
    assert (told["hist_tokens"], told["incr_tokens"], told["shared_tokens"]) == (32, 16, 8)


def test_reads_add_up_over_tries_and_reloads_over_workers() -> None:
    record = DecisionRecord("s", "ampd", Slo(1.0, 0.1))
    record.measures.prefilled(report(reload_s=0.5))
    record.measures.prefilled(report(hit_tokens={"peer": 16}))
    record.measures.read_increment(report(reload_s=0.25))
    told = record.as_dict()
    assert (told["kv_read_tokens_history"], told["kv_read_bytes_history"]) == (32, 3200)
    assert told["kv_read_tokens_increment"] == 16
    assert (told["hit_tokens"], told["kv_reload_s"]) == ({"peer": 16}, 0.75)
