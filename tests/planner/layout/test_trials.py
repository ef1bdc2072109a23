"""Trials are made in processes or here, and not after the time is over."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from planner.layout.layout import Layout
from planner.layout.trial import SHORT, Horizon, TimeOverError, Trials, TrialTask

from .lab import CASE

TASKS = [TrialTask(Layout((), ((degree, 1),)), 20.0, SHORT, 0) for degree in CASE.degrees]


@pytest.mark.slow
@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize("jobs", [1, 2])
def test_each_task_comes_with_its_outcome(jobs: int) -> None:
    with Trials(CASE, jobs, 1e6) as trials:
        assert dict(trials.run(TASKS)) == {task: task.run(CASE) for task in TASKS}
        assert trials.made == len(TASKS)


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_is_awaited_after_the_time_is_over_but_a_trial_can_be_made(jobs: int) -> None:
    with Trials(CASE, jobs, 0.0) as trials:
        with pytest.raises(TimeOverError):
            list(trials.run(TASKS))
        assert trials.make(TASKS[0]) == TASKS[0].run(CASE)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_trials_that_still_run_are_ended_when_the_time_is_over(jobs: int) -> None:
    # These would take minutes.
    long = [replace(task, horizon=Horizon(1e4, 0.0, 0, 10**9), seed=seed) for task in TASKS for seed in range(4)]
    before = set(multiprocessing.active_children())
    with Trials(CASE, jobs, 0.5) as trials:
        with pytest.raises(TimeOverError):
            list(trials.run(long))
        assert set(multiprocessing.active_children()) <= before


def test_the_best_layout_so_far_is_printed_when_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with Trials(CASE, 1, 0.0) as trials:
        for text in ("first", "first", "second"):
            trials.show(text)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["first", "second"]
    assert all(line.startswith("best after ") for line in lines)
