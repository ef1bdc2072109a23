"""One look as data: sums over coordinators, what is told of workers and sessions, and JSON that says the same."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from pydantic import TypeAdapter

from ampd.cli.top.snapshot import HeldSession, RouteCount, Snapshot, Targets, look
from ampd.perf.piecewise import load_performance_model
from ampd.telemetry.coordinator_view import CoordinatorView
from ampd.telemetry.latencies import Latencies
from ampd.telemetry.served_window import ServedWindow
from ampd.types import Parallelism, Role, Slo, Window, WorkerView
from tests.ampd.cli.top.lab import NOW_S, SLO, TAKEN_AT, overview, seen, snapshots, task

WINDOW = ServedWindow(
    span_s=30.0,
    rounds=10,
    abandoned=2,
    failed=1,
    met=6,
    met_ttft=7,
    met_itl=6,
    output_tokens=600,
    sessions_bound=3,
    routes={("local", "on-time"): 4, ("remote", "on-time"): 6},
    ttft_initial=Latencies.of([0.1, 0.3]),
)


def coordinator(name: str, window: ServedWindow = WINDOW, slo: Slo = SLO) -> CoordinatorView:
    return CoordinatorView(name, slo, window=window)


@given(snapshots)
def test_json_says_all_of_it(snapshot: Snapshot) -> None:
    assert TypeAdapter(Snapshot).validate_python(json.loads(json.dumps(snapshot.as_dict()))) == snapshot


def test_the_windows_of_all_coordinators_add_up() -> None:
    other = replace(WINDOW, span_s=60.0, routes={("local", "on-time"): 1, ("local", "hopeless"): 9})
    window = seen([], [coordinator("a"), coordinator("b", other)]).window
    assert (window.rounds, window.abandoned, window.errors, window.sessions_bound) == (20, 4, 2, 6)
    assert (window.rounds_per_s, window.output_tokens_per_s) == (20 / 60, 1200 / 60)
    assert window.attainment.rounds == 12 / 16
    assert (window.attainment.ttft, window.attainment.itl) == (14 / 16, 12 / 16)
    assert window.routes == {"local": 14, "remote": 6}
    assert window.reasons == (
        RouteCount("local", "hopeless", 9),
        RouteCount("remote", "on-time", 6),
        RouteCount("local", "on-time", 5),
    )
    assert window.ttft_initial_s.count == 4
    assert window.ttft_initial_s.mean == pytest.approx(0.2)
    assert window.ttft_incremental_s.p95 is None


def test_nothing_served_is_no_attainment() -> None:
    window = seen([], [coordinator("a", ServedWindow(span_s=5.0))]).window
    assert window.attainment.rounds is None
    assert window.rounds_per_s == 0
    assert window.routes == {"local": 0, "remote": 0}


def test_a_coordinators_row_is_its_own_window() -> None:
    row, other = seen([], [coordinator("a"), coordinator("b", ServedWindow())]).coordinators
    assert (row.rounds, row.attainment, row.local_share) == (10, 6 / 8, 0.4)
    assert (other.attainment, other.local_share) == (None, None)


def test_a_queue_is_predicted_by_the_performance_model() -> None:
    model = load_performance_model("tiny-cpu")
    queue = (task(100, waited_s=1.0), task(700, waited_s=4.0))
    views = [WorkerView("d", Role.DECODE, queue=queue), WorkerView("idle", Role.PREFILL)]
    row, idle = look(overview(views, []), "n", "here", TAKEN_AT, NOW_S, model).workers
    expected_s = sum(model.prefill_s(50, incr, Parallelism()) for incr in (100, 700))
    assert row.queue_wait_s == pytest.approx(expected_s)
    assert (row.queue_prefills, row.queue_tokens, row.oldest_wait_s) == (2, 800, 4.0)
    assert (idle.queue_wait_s, idle.oldest_wait_s) == (0.0, None)
    assert seen(views, []).workers[0].queue_wait_s is None


def test_a_parallelism_that_the_model_lacks_is_noted_once() -> None:
    views = [WorkerView(name, Role.DECODE, Parallelism(7), (task(),)) for name in ("a", "b")]
    snapshot = look(
        overview(views, [coordinator("c")]), "n", "here", TAKEN_AT, NOW_S, load_performance_model("tiny-cpu")
    )
    assert [row.queue_wait_s for row in snapshot.workers] == [None, None]
    (note,) = snapshot.notes
    assert "tp 7" in note


def test_a_window_without_samples_has_no_mean() -> None:
    views = [WorkerView("d", Role.DECODE, ttft=Window(0.0, 0), itl=Window(0.02, 5))]
    (row,) = seen(views, []).workers
    assert (row.ttft_s, row.itl_s) == (None, 0.02)


def test_sessions_are_counted_once_and_by_decode_workers() -> None:
    views = [
        WorkerView("d1", Role.DECODE, held_tokens={"a": 10, "b": 50}),
        WorkerView("d2", Role.DECODE, held_tokens={"a": 30, "c": 5, "d": 1}),
        WorkerView("p1", Role.PREFILL, held_tokens={"a": 1000, "e": 7}),
    ]
    snapshot = seen(views, [])
    assert (snapshot.sessions.held, snapshot.sessions.tokens) == (4, 96)
    assert snapshot.sessions.largest == (
        HeldSession("b", "d1", 50),
        HeldSession("a", "d2", 30),
        HeldSession("a", "d1", 10),
    )
    assert [(row.worker_id, row.sessions_held, row.session_tokens) for row in snapshot.workers] == [
        ("d1", 2, 60),
        ("d2", 3, 36),
        ("p1", 2, 1007),
    ]


@pytest.mark.parametrize(
    ("workers", "coordinators", "words"),
    [
        ([], [], "nobody is alive"),
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
    snapshot = seen(workers, coordinators)
    (note,) = snapshot.notes
    assert words in note
    assert snapshot.slo == (Targets(SLO.ttft_s, SLO.itl_s) if coordinators else None)


def test_a_healthy_graph_has_no_notes() -> None:
    snapshot = seen([WorkerView("d", Role.DECODE)], [coordinator("a")])
    assert snapshot.notes == ()
    assert not snapshot.is_empty
    assert seen([], []).is_empty
