"""Makes trials on all cores, each once, until the time is over."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import replace
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from planner.layout.search import PlanCase
from planner.layout.trial import Carried, GoodputTask, Trial, TrialTask

Task = TrialTask | GoodputTask

BUDGET_S = 60.0
"""Longest time of the trials of a plan, unless named."""


class TimeOverError(Exception):
    """The time for trials is over."""


class Trials:
    """Runs tasks of one case, in processes that know the case already.

    Args:
        jobs: processes; None: one per core.
        budget_s: seconds from now after which no result is awaited.

    Attributes:
        made: how many tasks were run.
    """

    def __init__(self, case: PlanCase, jobs: int | None, budget_s: float) -> None:
        self.case = case
        self.made = 0
        self._started_s = time.monotonic()
        self._budget_s = budget_s
        self._known: dict[Task, Any] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        self._submitted: list[Future[Any]] = []
        if (jobs or os.cpu_count() or 1) > 1:
            # Forked, so that the work begins at once. This process has no threads that could hold a lock.
            self._pool = ProcessPoolExecutor(jobs, get_context("fork"), _begin, (case,))
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._pool is not None:
            if not all(future.done() for future in self._submitted):
                # Nothing waits for the trials that still run.
                for process in self._processes:
                    process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def trials(self, tasks: Sequence[TrialTask]) -> list[Trial]:
        """The outcomes, in the order of the tasks. Raises `TimeOverError`; what was made until then stays known."""
        self._run(tasks)
        return [self._known[task] for task in tasks]

    def carried(self, tasks: Sequence[GoodputTask]) -> list[Carried]:
        """As `trials`, for searches of goodput."""
        self._run(tasks)
        return [self._known[task] for task in tasks]

    def known(self, task: Task) -> Any:
        """The outcome of a task that was made; None: it was not."""
        return self._known.get(task)

    def make(self, task: TrialTask) -> Trial:
        """The outcome of one trial, here and now, even if the time is over."""
        if task not in self._known:
            self._keep(task, task.run(self.case))
        trial: Trial = self._known[task]
        return trial

    def show(self, best: str) -> None:
        """Show the best layout so far beside the progress."""
        if self._bar is not None:
            self._bar.set_postfix_str(best)

    def _run(self, tasks: Sequence[Task]) -> None:
        missing = [task for task in dict.fromkeys(tasks) if task not in self._known]
        if missing and self.elapsed_s >= self._budget_s:
            raise TimeOverError
        if self._pool is None:
            for task in missing:
                if self.elapsed_s > self._budget_s:
                    raise TimeOverError
                self._keep(task, task.run(self.case))
            return
        before = set(active_children())
        waiting: dict[Future[Any], Task] = {self._pool.submit(_run_here, task): task for task in missing}
        self._processes |= set(active_children()) - before
        self._submitted = list(waiting)
        try:
            for future in as_completed(waiting, max(self._budget_s - self.elapsed_s, 0.0)):
                self._keep(waiting[future], future.result())
        except NotInTime:
            raise TimeOverError from None
        finally:
            for future in waiting:
                future.cancel()

    def _keep(self, task: Task, outcome: Any) -> None:
        self._known[task] = outcome
        if isinstance(task, TrialTask) and task.stops and outcome.is_whole:
            # It did not stop, so it is the same trial.
            self._known[replace(task, stops=False)] = outcome
        self.made += 1
        if self._bar is None:
            # After the processes have been forked, because the bar may start a thread.
            self._bar = tqdm(desc="simulating layouts", file=sys.stderr, disable=None, leave=False)
        self._bar.update()


_case: PlanCase | None = None
"""The case of a process of the pool."""


def _begin(case: PlanCase) -> None:
    global _case
    _case = case
    # Ctrl-C belongs to the process that waits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_here(task: Task) -> Any:
    assert _case is not None
    return task.run(_case)
