"""Makes trials on all cores until the time is over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from planner.layout.case import PlanCase
from planner.layout.trial import TimeOverError, Trial, TrialTask
from planner.parallel import Processes

BUDGET_S = 60.0
"""Longest time of the trials of a plan, unless named."""


class Trials:
    """Runs the tasks of one case, in processes that know the case.

    Args:
        jobs: processes; None: one per core.
        budget_s: seconds from now after which no result is awaited.

    Attributes:
        made: how many trials were made.
    """

    def __init__(self, case: PlanCase, jobs: int | None, budget_s: float) -> None:
        self._case = case
        self.made = 0
        self._started_s = time.monotonic()
        self._budget_s = budget_s
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

    def run(self, tasks: Sequence[TrialTask]) -> Iterator[tuple[TrialTask, Trial]]:
        """Each task with its outcome, as soon as it is there.

        Raises:
            TimeOverError: the budget is spent.
        """
        try:
            for task, trial in self._outcomes(tasks):
                self._count()
                yield task, trial
        except BaseException:
            # Nothing waits for the trials that still run.
            self._end()
            raise

    def make(self, task: TrialTask) -> Trial:
        """The outcome of a trial without which there is no plan, even if the time is over and after one Ctrl-C."""
        self._count()
        try:
            return task.run(self._case)
        except KeyboardInterrupt:
            return task.run(self._case)

    def show(self, best: str) -> None:
        """Print the best layout so far, if the text is another one than before."""
        if best != self._best:
            self._best = best
            tqdm.write(f"best after {self.elapsed_s:.1f} s: {best}", file=sys.stderr)

    def _outcomes(self, tasks: Sequence[TrialTask]) -> Iterator[tuple[TrialTask, Trial]]:
        if self._processes is None:
            for task in tasks:
                if self.elapsed_s >= self._budget_s:
                    raise TimeOverError
                yield task, task.run(self._case, self._started_s + self._budget_s)
            return
        left = iter(tasks)
        try:
            yield from self._processes.results(lambda: next(left, None), self._budget_s - self.elapsed_s)
        except TimeoutError:
            raise TimeOverError from None

    def _outcome(self, task: TrialTask) -> Trial:
        return task.run(self._case)

    def _end(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _count(self) -> None:
        self.made += 1
        if self._bar is None:
            # Without the bar's own thread, because processes are forked later too.
            tqdm.monitor_interval = 0
            self._bar = tqdm(desc="simulating layouts", file=sys.stderr, disable=None, leave=False)
        self._bar.update()
