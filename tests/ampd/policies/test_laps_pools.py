"""The lanes of LAPS: exact examples of every rule."""

import random
from dataclasses import replace

from ampd.policies.base import RoleChange
from ampd.policies.registry import create
from ampd.types import Role, Window, WorkerView
from tests.ampd.policies import situations
from tests.ampd.policies.pools_lab import LONG, MODEL, NEVER, SLO, TP4, decode, lanes, waiting


def laps(*workers: WorkerView, since_s: float = NEVER) -> list[RoleChange]:
    return list(situations.change(create("pools", "laps"), workers, SLO, MODEL, 100.0, since_s, random.Random(0)))


def joined(changes: list[RoleChange]) -> list[tuple[str, str]]:
    return [(change.worker_id, change.label) for change in changes]


def test_workers_without_a_lane_get_the_smaller_one_at_once() -> None:
    changes = laps(*lanes("", "", ""), decode("d"), since_s=99.9)
    assert joined(changes) == [("p0", "short"), ("p1", "long"), ("p2", "short")]
    assert {(change.role, change.reason) for change in changes} == {(Role.PREFILL, "joined")}
    assert joined(laps(*lanes("short", "short", "long", ""))) == [("p3", "long")]


def test_too_few_workers_have_no_lanes() -> None:
    assert laps(*lanes("")) == []


def test_a_worker_follows_the_pressure() -> None:
    short0, short1, long0, long1 = lanes("short", "short", "long", "long")
    pressed = replace(long0, queue=waiting(LONG, LONG, LONG))
    busy = replace(short0, queue=waiting(100))
    assert laps(busy, short1, pressed, long1) == [RoleChange("p1", Role.PREFILL, "pressure", "long")]
    pressed, busy = replace(short0, queue=pressed.queue), replace(long0, queue=busy.queue)
    assert laps(pressed, short1, busy, long1) == [RoleChange("p3", Role.PREFILL, "pressure", "short")]


def test_pressures_must_differ_by_more_than_tau() -> None:
    def pressed(worker: WorkerView, share: float) -> WorkerView:
        return replace(worker, ttft=Window((1.0 + share) * SLO.ttft_s, 3))

    short0, short1, long0, long1 = lanes("short", "short", "long", "long")
    for share, moves in ((0.16, True), (0.14, False)):
        changes = laps(pressed(short0, 0.1), pressed(short1, 0.1), pressed(long0, share), pressed(long1, share))
        assert bool(changes) is moves


def test_a_lane_is_as_pressed_as_its_90th_percentile() -> None:
    """One of ten workers in trouble does not count; two do."""
    late = Window(3.0, 3)
    short, long = lanes("short", "short"), lanes(*["long"] * 10)
    long = [replace(worker, worker_id=f"l{number}") for number, worker in enumerate(long)]
    for troubled, moves in ((1, False), (2, True)):
        pressed = [replace(worker, ttft=late) for worker in long[:troubled]] + long[troubled:]
        assert bool(laps(*short, *pressed)) is moves


def test_a_prefill_that_computes_is_no_pressure_and_one_that_waits_is() -> None:
    short0, short1, long0 = lanes("short", "short", "long")
    assert laps(short0, short1, replace(long0, queue=waiting(LONG))) == []
    assert laps(short0, short1, replace(long0, queue=waiting(LONG, LONG))) != []
    little = replace(long0, queue=waiting(LONG, 16))
    assert MODEL.prefill_s(0, 16, TP4) < 0.1 * SLO.ttft_s
    assert laps(short0, short1, little) == []  # less than what a busy worker is good for


def test_a_worker_stays_in_each_lane_and_a_lane_that_lost_its_own_is_filled_up() -> None:
    short, long = lanes("short", "long")
    assert laps(short, replace(long, queue=waiting(LONG, LONG, LONG))) == []
    assert joined(laps(*lanes("long", "long"))) in ([("p0", "short")], [("p1", "short")])
    assert laps(*lanes("long", "long"))[0].reason == "refill"
    assert laps(*lanes("long", "long"), since_s=99.0) == []
