"""The snapshot as data: sums over coordinators, rows of workers and sessions, notes on problems."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given

from ampd.cli.top_screen import as_text
from ampd.perf.presets import load_performance_model
from ampd.types import CoordinatorView, Factors, KvWindow, Parallelism, Role, ServedWindow, Slo, Window, WorkerView
from tests.ampd.cli.top.lab import SLO, snapshot, snapshots, task, window

OUTCOMES = {"met": 6, "missed-itl": 1, "failed": 1, "abandoned": 2}
COUNTS = {"output_tokens": 600, "bound": 3}
LATENCIES_S = {"ttft_initial": [0.1, 0.3]}
WINDOW = window(OUTCOMES, {"local on-time": 4, "remote on-time": 6}, 30.0, LATENCIES_S, **COUNTS)


def coordinator(name: str, window: ServedWindow = WINDOW, slo: Slo = SLO) -> CoordinatorView:
    return CoordinatorView(name, slo, window=window)


@pytest.mark.slow
@given(snapshots)
def test_json_holds_all_of_it(seen: dict[str, Any]) -> None:
    assert json.loads(json.dumps(seen)) == seen


def test_the_windows_of_all_coordinators_add_up() -> None:
    other = window(OUTCOMES, {"local on-time": 1, "local hopeless": 9}, 60.0, LATENCIES_S, **COUNTS)
    shown = snapshot([], [coordinator("a"), coordinator("b", other)])["window"]
    assert [shown[key] for key in ("rounds", "abandoned", "errors", "sessions_bound")] == [20, 4, 2, 6]
    assert (shown["rounds_per_s"], shown["output_tokens_per_s"]) == (20 / 60, 1200 / 60)
    assert shown["attainment"] == {"rounds": 12 / 16, "ttft": 14 / 16, "itl": 12 / 16}
    assert shown["routes"] == {"local": 14, "remote": 6}
    assert shown["reasons"] == [
        {"route": "local", "reason": "hopeless", "rounds": 9},
        {"route": "remote", "reason": "on-time", "rounds": 6},
        {"route": "local", "reason": "on-time", "rounds": 5},
    ]
    assert shown["ttft_initial_s"]["count"] == 4
    assert shown["ttft_initial_s"]["mean"] == pytest.approx(0.2)
    assert shown["ttft_incremental_s"]["p95"] is None


def test_nothing_served_is_no_attainment() -> None:
    shown = snapshot([], [coordinator("a", ServedWindow(span_s=5.0))])["window"]
    assert shown["attainment"]["rounds"] is None
    assert shown["rounds_per_s"] == 0
    assert shown["routes"] == {"local": 0, "remote": 0}


def test_a_coordinators_row_is_its_own_window() -> None:
    row, other = snapshot([], [coordinator("a"), coordinator("b", ServedWindow())])["coordinators"]
    assert (row["rounds"], row["attainment"], row["local_share"]) == (10, 6 / 8, 0.4)
    assert (other["attainment"], other["local_share"]) == (None, None)


def test_a_queue_is_predicted_by_the_performance_model() -> None:
    model = load_performance_model("tiny-cpu")
    queue = (task(100, waited_s=1.0), task(700, waited_s=4.0))
    views = [WorkerView("d", Role.DECODE, queue=queue), WorkerView("idle", Role.PREFILL)]
    row, idle = snapshot(views, [], model=model)["workers"]
    expected_s = sum(model.prefill_s(50, incr, Parallelism()) for incr in (100, 700))
    assert row["queue_wait_s"] == pytest.approx(expected_s)
    assert (row["queue_prefills"], row["queue_tokens"], row["oldest_wait_s"]) == (2, 800, 4.0)
    assert (idle["queue_wait_s"], idle["oldest_wait_s"]) == (0.0, None)
    assert snapshot(views, [])["workers"][0]["queue_wait_s"] is None


def test_the_performance_model_is_named_and_its_factors_count() -> None:
    model, queue = load_performance_model("tiny-cpu"), (task(100, waited_s=1.0),)
    slow = Parallelism(factors=Factors(prefill=2.5, step=0.8))
    views = [WorkerView(name, Role.DECODE, theta, queue) for name, theta in (("a", Parallelism()), ("b", slow))]
    seen = snapshot(views, [], model=model)
    plain, slowed = seen["workers"]
    assert seen["performance_model"] == "tiny-cpu"
    assert slowed["queue_wait_s"] == pytest.approx(2.5 * plain["queue_wait_s"])
    assert slowed["time_factors"] == {"prefill": 2.5, "step": 0.8, "mixed": 1.0, "read": 1.0, "load": 1.0}
    shown = as_text(seen, 200)
    assert "times of tiny-cpu" in shown.splitlines()[0]
    assert "x2.50" in shown
    assert "times of" not in as_text(snapshot(views, []), 200)


def test_a_parallelism_that_the_model_lacks_is_noted_once() -> None:
    views = [WorkerView(name, Role.DECODE, Parallelism(7), (task(),)) for name in ("a", "b")]
    seen = snapshot(views, [coordinator("c")], model=load_performance_model("tiny-cpu"))
    assert [row["queue_wait_s"] for row in seen["workers"]] == [None, None]
    (note,) = seen["notes"]
    assert "tp 7" in note


def test_a_window_without_samples_has_no_mean() -> None:
    views = [WorkerView("d", Role.DECODE, ttft=Window(0.0, 0), itl=Window(0.02, 5))]
    (row,) = snapshot(views, [])["workers"]
    assert (row["ttft_s"], row["itl_s"]) == (None, 0.02)


def test_the_kv_of_the_workers_adds_up() -> None:
    views = [
        WorkerView("a", Role.DECODE, store_capacity_tokens=100, kv_window=KvWindow(1, 20, 300, 4000, 5, 2, 0.5)),
        WorkerView("b", Role.DECODE, store_capacity_tokens=50, store_used_tokens=9, kv_window=KvWindow(2, reloads=3)),
    ]
    seen = snapshot(views, [])
    assert seen["kv"] == {
        "store_used_tokens": 9,
        "store_capacity_tokens": 150,
        "hit_tokens": {"device": 3, "store": 20, "peer": 300, "recomputed": 4000},
        "evicted_tokens": 5,
        "reload_s": {"count": 5, "mean": 0.1},
    }
    first, second = seen["workers"]
    assert (first["hit_tokens"]["store"], first["reload_s"]) == (20, {"count": 2, "mean": 0.25})
    assert (second["hit_tokens"]["device"], second["reload_s"]) == (2, {"count": 3, "mean": 0.0})
    assert snapshot([], [])["kv"]["reload_s"] == {"count": 0, "mean": None}


def test_sessions_are_counted_once_and_by_decode_workers() -> None:
    views = [
        WorkerView("d1", Role.DECODE, held_tokens={"a": 10, "b": 50}),
        WorkerView("d2", Role.DECODE, held_tokens={"a": 30, "c": 5, "d": 1}),
        WorkerView("p1", Role.PREFILL, held_tokens={"a": 1000, "e": 7}),
    ]
    seen = snapshot(views, [])
    assert seen["sessions"] == {
        "held": 4,
        "tokens": 96,
        "largest": [
            {"session_id": "b", "worker_id": "d1", "tokens": 50},
            {"session_id": "a", "worker_id": "d2", "tokens": 30},
            {"session_id": "a", "worker_id": "d1", "tokens": 10},
        ],
        "breaking": 0,
        "worst_breaking": [],
    }
    assert [(row["worker_id"], row["sessions_held"], row["session_tokens"]) for row in seen["workers"]] == [
        ("d1", 2, 60),
        ("d2", 3, 36),
        ("p1", 2, 1007),
    ]


def test_a_copy_on_a_mixed_worker_is_no_session_of_its_own() -> None:
    views = [
        WorkerView("d", Role.DECODE, held_tokens={"a": 10}),
        WorkerView("m1", Role.MIXED, held_tokens={"a": 8, "b": 50}),
        WorkerView("m2", Role.MIXED, held_tokens={"b": 30, "c": 5}),
    ]
    sessions = snapshot(views, [coordinator("c")])["sessions"]
    assert (sessions["held"], sessions["tokens"]) == (3, 65)
    assert [(row["session_id"], row["worker_id"]) for row in sessions["largest"]] == [
        ("b", "m1"),
        ("a", "d"),
        ("c", "m2"),
    ]


def test_mixed_workers_alone_serve() -> None:
    assert snapshot([WorkerView("m", Role.MIXED)], [coordinator("c")])["notes"] == []


@pytest.mark.parametrize(
    ("workers", "coordinators", "words"),
    [
        ([], [], "no worker and no coordinator is alive"),
        ([WorkerView("d", Role.DECODE)], [], "no coordinator"),
        ([WorkerView("p", Role.PREFILL)], [coordinator("a")], "no decode worker"),
        ([], [coordinator("a")], "no decode worker"),
        ([WorkerView("d", Role.DECODE)], [replace(coordinator("deaf"), is_state_heard=False)], "coordinator deaf"),
        (
            [WorkerView("d", Role.DECODE)],
            [coordinator("a"), coordinator("b"), coordinator("c", slo=Slo(9.0, 0.05))],
            "different targets",
        ),
    ],
)
def test_what_is_wrong_is_noted(workers: list[WorkerView], coordinators: list[CoordinatorView], words: str) -> None:
    seen = snapshot(workers, coordinators)
    (note,) = seen["notes"]
    assert words in note
    assert seen["slo"] == (asdict(SLO) if coordinators else None)


def test_a_healthy_graph_has_no_notes() -> None:
    assert snapshot([WorkerView("d", Role.DECODE)], [coordinator("a")])["notes"] == []
