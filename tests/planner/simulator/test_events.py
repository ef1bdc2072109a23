"""The event loop: events in order of time, equal times in order of entry."""

import pytest

from planner.simulator.options import EventLoop


def test_nothing_happens_in_the_past() -> None:
    loop = EventLoop()
    seen: list[str] = []
    loop.at(2.0, lambda _: loop.at(1.0, seen.append, "too late"))
    with pytest.raises(ValueError, match="any more"):
        loop.run()
    assert not seen


def test_equal_times_keep_the_order_of_entry() -> None:
    loop = EventLoop()
    seen: list[int] = []
    for number in range(20):
        loop.at(1.0, seen.append, number)
    loop.run()
    assert seen == list(range(20))


def test_it_stops_before_the_first_later_event() -> None:
    loop = EventLoop()
    seen: list[float] = []
    for when_s in (1.0, 2.0, 3.0):
        loop.at(when_s, seen.append, when_s)
    loop.run(until_s=2.0)
    assert (seen, loop.now_s) == ([1.0, 2.0], 2.0)
