"""Makes trials on all cores, each once, until the time is over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from planner.layout.processes import Processes
from planner.layout.search import PlanCase
from planner.layout.trial import Carried, GoodputTask, TimeOverError, Trial, TrialTask

Task = TrialTask | GoodputTask

BUDGET_S = 60.0
"""Longest time of the trials of a plan, unless named."""


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
        count = jobs or os.cpu_count() or 1
        self._processes = Processes(self._outcome, count) if count > 1 else None
        self._bar: Any = None
        self._best = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._end()

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
        """Print the best layout so far, if the text is another one than before."""
        if best != self._best:
            self._best = best
            tqdm.write(f"best after {self.elapsed_s:.1f} s: {best}", file=sys.stderr)

    def _run(self, tasks: Sequence[Task]) -> None:
        missing = [task for task in dict.fromkeys(tasks) if task not in self._known]
        if missing and self.elapsed_s >= self._budget_s:
            raise TimeOverError
        try:
            for task, outcome in self._outcomes(missing):
                self._keep(task, outcome)
        except BaseException:
            # Nothing waits for the trials that still run.
            self._end()
            raise

    def _outcomes(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        if self._processes is None:
            for task in tasks:
                if self.elapsed_s > self._budget_s:
                    raise TimeOverError
                yield task, self._outcome(task)
            return
        try:
            yield from self._processes.results(tasks, self._budget_s - self.elapsed_s)
        except TimeoutError:
            raise TimeOverError from None

    def _outcome(self, task: Task) -> Any:
        return task.run(self.case)

    def _end(self) -> None:
        if self._processes is not None:
            self._processes.close()

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
