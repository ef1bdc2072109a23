"""Each checker reports the violation that it is for, and nothing where all is well."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults.cell import disturbances, recover_s
from benchmarks.faults.inside import WITHOUT_KV, session_figures
from benchmarks.faults.invariants import MUST_BE_ZERO, TOLD_OVER, check_endings, check_idle, check_owners
from benchmarks.faults.load import Ending, RoundResult
from workers.session_releaser import _Use

TASKS = {"decode": {"publisher": 1}}


def result(ending: Ending = Ending.COMPLETED, worker_id: str = "a", epoch: int = 1, **fields: Any) -> RoundResult:
    records = [{"epoch": epoch, "decode_worker": worker_id}]
    return RoundResult("s1", 0.0, ending=ending, **{"records": records, **fields})


def figures(**changed: Any) -> dict[str, dict[str, Any]]:
    return {"decode-3": {**dict.fromkeys(MUST_BE_ZERO, 0), "tasks": {"publisher": 1}, **changed}}


def test_right_rounds_clear_errors_and_clients_that_leave_are_no_violations() -> None:
    failed = result(Ending.FAILED, detail="503: no decode worker")
    assert check_endings([result(), failed, result(Ending.LEFT)]) == []


@pytest.mark.parametrize(
    ("ending", "detail"), [(Ending.LOST, "no end"), (Ending.WRONG, "other text"), (Ending.FAILED, "")]
)
def test_lost_and_wrong_rounds_and_errors_without_a_message_are_reported(ending: Ending, detail: str) -> None:
    (violation,) = check_endings([result(), result(ending, detail=detail)])
    assert violation == f"s1: {ending}: {detail}"


def test_a_session_may_move_with_a_new_epoch() -> None:
    moved = result(records=[{"epoch": 1, "decode_worker": "a"}, {"epoch": 2, "decode_worker": "b"}])
    assert check_owners([result(), moved, result(worker_id="b", epoch=2)], {"s1": "b"}) == []


def test_two_owners_of_a_session_in_one_epoch_are_reported() -> None:
    assert check_owners([result(), result(worker_id="b")], {}) == ["s1: epoch 1 has the owners a, b"]


def test_an_owner_that_was_replaced_and_serves_again_is_reported() -> None:
    results = [result(), result(worker_id="b", epoch=2), result()]
    assert check_owners(results, {}) == ["s1: epoch 1 after epoch 2"]


def test_an_epoch_that_a_coordinator_could_not_know_is_not_reported() -> None:
    assert check_owners([result(epoch=2), result(epoch=0), result(epoch=2)], {}) == []
    assert check_owners([result(epoch=2), result(epoch=0), result()], {}) == ["s1: epoch 1 after epoch 2"]


def test_a_session_that_its_final_round_ended_lives_anew_when_that_round_is_sent_again() -> None:
    left = replace(result(), ending=Ending.FAILED, detail="the connection broke", is_final=True)
    again = replace(result(worker_id="b"), is_final=True)
    assert check_owners([result(), left, again], {}) == []
    assert check_owners([result(), again], {}) == [], "its frontend may have sent it again"
    moved = replace(result(epoch=2), ending=Ending.FAILED)
    assert check_owners([moved, replace(again, records=result(worker_id="b", epoch=2).records)], {}) == [
        "s1: epoch 2 has the owners a, b"
    ]


def test_an_owner_that_the_shared_state_does_not_know_is_reported() -> None:
    assert check_owners([result()], {"s1": "b"}) == ["s1: its last round was on a, the shared state names b"]


def test_an_idle_graph_has_nothing_left() -> None:
    assert check_idle(figures(), TASKS, []) == []


@pytest.mark.parametrize("figure", MUST_BE_ZERO)
def test_what_outlives_its_owner_is_reported(figure: str) -> None:
    assert check_idle(figures(**{figure: 2}), TASKS, []) == [f"decode-3: 2 {figure}"]


def test_a_task_that_goes_on_is_reported() -> None:
    left = figures(tasks={"publisher": 1, "RoundRun._take_over": 1})
    assert check_idle(left, TASKS, []) == ["decode-3: 1 tasks 'RoundRun._take_over', 0 were expected"]


def test_a_binding_that_stays_is_reported() -> None:
    assert check_idle(figures(), TASKS, ["session:s1"]) == ["the shared state has session:s1"]


def test_a_stall_ends_when_the_next_token_comes() -> None:
    stalled = replace(result(), started_s=0.0, token_s=[0.5, 0.6, 3.0], ended_s=3.1)
    assert stalled.stalls(since_s=0.7, longest_s=1.0) == [(0.7, 3.0)]
    assert stalled.stalls(since_s=2.5, longest_s=1.0) == []
    assert replace(stalled, ended_s=9.0).stalls(since_s=5.0, longest_s=1.0) == [(5.0, 9.0)]


def test_a_session_recovers_with_its_next_token() -> None:
    failed = replace(result(), ending=Ending.FAILED, started_s=0.0, token_s=[0.5], ended_s=0.9)
    again = replace(result(), started_s=1.1, token_s=[1.7, 1.8], ended_s=1.9)
    stalled = replace(result(), session_id="other", started_s=2.0, token_s=[4.5], ended_s=4.6)
    later = replace(result(), session_id="other", started_s=9.0, token_s=[15.0], ended_s=15.1)
    waits = disturbances([failed, again, stalled, later], "victim", struck_s=0.6, healed_s=6.0, victim_stall_s=0.1)
    assert waits == [(0.6, 1.7), (2.0, 4.5)]
    assert recover_s(waits, 0.6, lasts=False) == pytest.approx(3.9), "from the fault to the last of them"
    assert recover_s(waits, 0.6, lasts=True) == pytest.approx(2.5), "the longest wait"
    assert recover_s([], 0.6, lasts=True) == recover_s([], 0.6, lasts=False) == 0.0


def test_a_session_that_is_kept_has_kv_or_a_round() -> None:
    uses = {"a": _Use(is_held=True), "b": _Use(running=1), "c": _Use(), "d": _Use(rounds=2)}
    assert session_figures(SimpleNamespace(_uses=uses)) == {"kept sessions": 2, WITHOUT_KV: 2}


def test_a_worker_has_one_connection_to_a_coordinator() -> None:
    tasks = {TOLD_OVER: 2}
    assert check_idle({"coordinator-4": {"tasks": tasks, "workers": ["a", "b"]}}, {"coordinator": {}}, []) == []
    (violation,) = check_idle({"coordinator-4": {"tasks": tasks, "workers": ["a"]}}, {"coordinator": {}}, [])
    assert violation == f"coordinator-4: 2 tasks {TOLD_OVER!r}, 1 were expected"
