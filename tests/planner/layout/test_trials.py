"""Trials are made once, in processes or here, and not after the time is over."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from planner.layout.layout import Layout
from planner.layout.trial import SHORT, Horizon, TimeOverError, TrialTask
from planner.layout.trials import Trials

from .lab import CASE

TASKS = [TrialTask(Layout((), ((degree, 1),)), 20.0, SHORT, 0) for degree in CASE.degrees]


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_tasks_and_are_kept(jobs: int) -> None:
    expected = [task.run(CASE) for task in TASKS]
    with Trials(CASE, jobs, 1e6) as trials:
        assert trials.trials([*TASKS, *TASKS]) == expected * 2
        assert trials.made == len(TASKS)
        assert trials.known(TASKS[0]) == trials.make(TASKS[0]) == expected[0]
        assert trials.made == len(TASKS)
        # One that ran to its end is the same, whenever it would have stopped. Its result was not kept.
        assert trials.known(replace(TASKS[0], margin=None)) == expected[0]
        assert trials.known(replace(TASKS[0], keeps_result=True)) is None


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_is_awaited_after_the_time_is_over_but_a_trial_can_be_made(jobs: int) -> None:
    with Trials(CASE, jobs, 0.0) as trials:
        with pytest.raises(TimeOverError):
            trials.trials(TASKS)
        assert trials.make(TASKS[0]) == TASKS[0].run(CASE)


def test_the_time_can_be_made_shorter_and_never_longer() -> None:
    with Trials(CASE, 1, 1e6) as trials:
        trials.end_at(0.0)
        trials.end_at(1e6)
        with pytest.raises(TimeOverError):
            trials.trials(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_trials_that_still_run_are_ended_when_the_time_is_over(jobs: int) -> None:
    # These would take minutes.
    long = [replace(task, horizon=Horizon(1e4, 0.0, 0, 10**9), seed=seed) for task in TASKS for seed in range(4)]
    before = set(multiprocessing.active_children())
    with Trials(CASE, jobs, 0.5) as trials:
        with pytest.raises(TimeOverError):
            trials.trials(long)
        assert set(multiprocessing.active_children()) <= before


def test_the_best_layout_so_far_is_printed_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with Trials(CASE, 1, 0.0) as trials:
        for text in ("first", "first", "second"):
            trials.show(text)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["first", "second"]
    assert all(line.startswith("best after ") for line in lines)
