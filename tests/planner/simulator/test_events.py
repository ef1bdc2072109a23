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


def test_it_stops_before_the_first_later_event() -> None:
    loop = EventLoop()
    seen: list[float] = []
    for when_s in (1.0, 2.0, 3.0):
        loop.at(when_s, seen.append, when_s)
    loop.run(until_s=2.0)
    assert (seen, loop.now_s) == ([1.0, 2.0], 2.0)


def test_actions_that_are_entered_together_run_as_if_entered_one_by_one() -> None:
    def run(*, together: bool) -> tuple[list[tuple[float, str]], int]:
        loop, done = EventLoop(), list[tuple[float, str]]()

        def act(name: str) -> None:
            done.append((loop.now_s, name))
            if len(name) < 3:
                loop.at(loop.now_s + 1.0, act, f"{name}+")

        arrivals = [(2.0, "a"), (0.0, "b"), (1.0, "c"), (1.0, "d"), (2.0, "e")]
        loop.at(1.0, act, "first")
        if together:
            loop.at_each(act, arrivals)
        else:
            for when_s, name in arrivals:
                loop.at(when_s, act, name)
        loop.at(2.0, act, "last")
        loop.run()
        return done, loop.handled

    assert run(together=True) == run(together=False)


def test_actions_that_are_entered_together_must_not_have_passed() -> None:
    loop = EventLoop()
    loop.at(1.0, lambda _: None)
    loop.run()
    with pytest.raises(ValueError, match=r"it is 1\.0 s, nothing can be done at 0\.5 s any more"):
        loop.at_each(lambda _: None, [(2.0, None), (0.5, None)])
