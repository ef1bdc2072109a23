"""Makes trials on all cores until the time is over. Each trial is made only once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from planner.layout.agenda import Agenda, Steps
from planner.layout.case import PlanCase
from planner.layout.processes import Processes
from planner.layout.trial import TimeOverError, Trial, TrialTask

BUDGET_S = 60.0
"""Longest time of the trials of a plan, unless named."""


class Trials:
    """Runs the tasks of one case, in processes that know the case.

    Args:
        jobs: processes; None: one per core.
        budget_s: seconds from now after which no result is awaited.

    Attributes:
        made: how many tasks were run.
        is_cut: a part of the time was over (`ending_at`) before its trials were made.
    """

    def __init__(self, case: PlanCase, jobs: int | None, budget_s: float) -> None:
        self.case = case
        self.made = 0
        self.is_cut = False
        self._started_s = time.monotonic()
        self._budget_s = budget_s
        self._whole: dict[TrialTask, Trial] = {}
        self._stopped: dict[TrialTask, Trial] = {}
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

    def end_at(self, budget_s: float) -> None:
        """Await no result later than this many seconds after the start."""
        self._budget_s = min(self._budget_s, budget_s)

    def go_on_until(self, budget_s: float) -> None:
        """Await results until this many seconds after the start, also if the time was over before."""
        self._budget_s = budget_s

    @contextmanager
    def ending_at(self, budget_s: float) -> Iterator[None]:
        """As `end_at` within the `with` block. Afterwards results are awaited as before."""
        before_s = self._budget_s
        self.end_at(budget_s)
        try:
            yield
        except TimeOverError:
            self.is_cut = True
            raise
        finally:
            self._budget_s = before_s

    def trials(self, tasks: Sequence[TrialTask]) -> list[Trial]:
        """The outcomes, in the order of the tasks. Raises `TimeOverError`; the outcomes until then stay known."""
        self.together([iter([tasks])])
        known = [self.known(task) for task in tasks]
        return [trial for trial in known if trial is not None]

    def together(self, searches: Iterable[Steps]) -> None:
        """Run searches at the same time, until all have ended. Raises `TimeOverError` as `trials` does."""
        agenda = Agenda(searches, lambda task: self.known(task) is not None)
        try:
            for task, outcome in self._outcomes(agenda):
                self._keep(task, outcome)
        except BaseException:
            # Nothing waits for the trials that still run.
            self._end()
            raise

    def known(self, task: TrialTask) -> Trial | None:
        """The outcome of a task; None: the task was not made."""
        # A trial that ran to its end is the same one, whenever it would have stopped.
        whole = self._whole.get(_endless(task))
        if whole is not None and (whole.result is not None or not task.keeps_result):
            return whole
        return self._stopped.get(task)

    def make(self, task: TrialTask) -> Trial:
        """The outcome of one trial, here and now, even if the time is over, and after one Ctrl-C in it.

        A plan needs it, so a search would be lost without it.
        """
        known = self.known(task)
        if known is None:
            try:
                known = task.run(self.case)
            except KeyboardInterrupt:
                known = task.run(self.case)
            self._keep(task, known)
        return known

    def show(self, best: str) -> None:
        """Print the best layout so far, if the text is another one than before."""
        if best != self._best:
            self._best = best
            tqdm.write(f"best after {self.elapsed_s:.1f} s: {best}", file=sys.stderr)

    def _outcomes(self, agenda: Agenda) -> Iterator[tuple[TrialTask, Trial]]:
        if self._processes is None:
            while (task := agenda.next_task()) is not None:
                if self.elapsed_s >= self._budget_s:
                    raise TimeOverError
                yield task, task.run(self.case, self._started_s + self._budget_s)
            return
        try:
            yield from self._processes.results(agenda.next_task, self._budget_s - self.elapsed_s)
        except TimeoutError:
            raise TimeOverError from None

    def _outcome(self, task: TrialTask) -> Trial:
        return task.run(self.case)

    def _end(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _keep(self, task: TrialTask, trial: Trial) -> None:
        if trial.is_whole:
            self._whole[_endless(task)] = trial
        else:
            self._stopped[task] = trial
        self.made += 1
        if self._bar is None:
            # Without the bar's own thread, because processes are forked again after a part of the time was over.
            tqdm.monitor_interval = 0
            self._bar = tqdm(desc="simulating layouts", file=sys.stderr, disable=None, leave=False)
        self._bar.update()


def _endless(task: TrialTask) -> TrialTask:
    return replace(task, margin=None, keeps_result=False)
