"""Searches that go on together: which trial is next, and that none is lost or made twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.layout.agenda import Agenda, Steps
from planner.layout.layout import Layout
from planner.layout.trial import SHORT, TrialTask


def task(number: int) -> TrialTask:
    return TrialTask(Layout((), ((1, 1),)), 1.0, SHORT, number)


def test_the_trials_of_earlier_searches_come_first_and_others_fill_the_gaps() -> None:
    known: set[TrialTask] = set()
    agenda = Agenda([iter([[task(1)], [task(2)]]), iter([[task(3), task(4)]])], known.__contains__)
    assert agenda.next_task() == task(1)
    assert agenda.next_task() == task(3), "the first search waits for its trial"
    known.add(task(1))
    assert agenda.next_task() == task(2)
    assert agenda.next_task() == task(4)
    assert agenda.next_task() is None
    known.update(map(task, (2, 3, 4)))
    assert agenda.next_task() is None


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4), max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
def test_every_search_ends_and_no_trial_is_made_twice(
    searches: list[list[list[int]]], order: object, processes: int
) -> None:
    known: set[TrialTask] = set()
    ended: list[int] = []

    def steps(number: int) -> Steps:
        for wanted in searches[number]:
            yield [task(each) for each in wanted]
            assert known.issuperset(map(task, wanted)), "a search goes on only when its trials are known"
        ended.append(number)

    agenda = Agenda([steps(number) for number in range(len(searches))], known.__contains__)
    begun: list[TrialTask] = []
    running: list[TrialTask] = []
    while True:
        while len(running) < processes and (following := agenda.next_task()) is not None:
            assert following not in begun
            begun.append(following)
            running.append(following)
        if not running:
            break
        known.add(running.pop(order.randrange(len(running))))  # type: ignore[attr-defined]
    assert sorted(ended) == list(range(len(searches)))
    assert set(begun) == {task(each) for wanted in searches for step in wanted for each in step}
