"""The event loop: events in order of time, equal times in order of entry."""

import pytest

from planner.simulator.events import EventLoop


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
