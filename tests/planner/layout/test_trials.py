"""Trials are made once, in processes or here, and not after the time is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from planner.layout import trials as trials_module
from planner.layout.layout import Layout
from planner.layout.trial import SHORT, GoodputTask, Horizon, TrialTask
from planner.layout.trials import TimeOverError, Trials

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
        search = GoodputTask(TASKS[0].layout, 20.0, 0, expected[0])
        assert trials.carried([search])[0].tried[20.0] == expected[0]


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_is_awaited_after_the_time_is_over_but_a_trial_can_be_made(jobs: int) -> None:
    with Trials(CASE, jobs, 0.0) as trials:
        with pytest.raises(TimeOverError):
            trials.trials(TASKS)
        assert trials.make(TASKS[0]) == TASKS[0].run(CASE)


@pytest.mark.slow
def test_trials_that_still_run_are_ended_with_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_when_all_run(futures: Iterable[Future[Any]], _: float) -> None:
        while not all(future.running() for future in futures):
            time.sleep(0.01)
        raise TimeoutError

    monkeypatch.setattr(trials_module, "as_completed", over_when_all_run)
    # These would take minutes.
    long = [replace(task, horizon=Horizon(1e4, 0.0, 0, 10**9)) for task in TASKS]
    with Trials(CASE, 2, 1e6) as trials, pytest.raises(TimeOverError):
        trials.trials(long)
    assert [process.exitcode for process in trials._processes] == [-signal.SIGTERM] * 2
