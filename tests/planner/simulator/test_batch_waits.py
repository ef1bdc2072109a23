"""Prefills that wait for a decode batch: each goes on once, when a round ends or its time has come."""

from __future__ import annotations

from planner.simulator.events import EventLoop
from planner.simulator.worker import BatchWaits


def test_each_goes_on_once_at_the_end_of_a_round_or_after_its_wait() -> None:
    loop = EventLoop()
    batch_waits = BatchWaits(loop)
    resumed: list[tuple[str, float]] = []

    def wait(name: str, wait_s: float) -> None:
        batch_waits.wait(wait_s, lambda: resumed.append((name, loop.now_s)))

    wait("patient", 5.0)
    wait("hasty", 1.0)
    loop.at(2.0, lambda _: batch_waits.round_ended())
    loop.at(3.0, lambda _: wait("late", 4.0))
    loop.run()
    assert resumed == [("hasty", 1.0), ("patient", 2.0), ("late", 7.0)]


def test_the_engine_goes_on_before_the_prefills_that_a_round_releases() -> None:
    loop = EventLoop()
    batch_waits = BatchWaits(loop)
    order: list[str] = []
    batch_waits.wait(9.0, lambda: order.append("prefill"))

    def ended(_: object) -> None:
        batch_waits.round_ended()
        order.append("engine")

    loop.at(1.0, ended)
    loop.run()
    assert order == ["engine", "prefill"]
