"""Made-up trials: a test says what each layout carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planner.layout.layout import Layout
from planner.layout.trial import LONG, TimeOverError, Trial, TrialTask

SIMULATED: dict[str, Any] = {
    "rounds": 20,
    "sessions": 9,
    "errors": 0,
    "lost_sessions": 0,
    "ttft_s": {"p95": 0.1},
    "mean_itl_s": {"p95": 0.01},
}
"""What a plan reads of a simulation."""


class MadeUpTrials:
    """Trials that are there at once.

    Args:
        capacity: (layout, seed) -> the highest rate that is carried. Above it the share of met rounds falls.
        most: trials until the time is over.

    Attributes:
        tasks: those that were made.
    """

    def __init__(self, capacity: Callable[[Layout, int], float], most: int = 10**6) -> None:
        self._capacity, self._most = capacity, most
        self.tasks: list[TrialTask] = []

    @property
    def made(self) -> int:
        return len(self.tasks)

    def run(self, tasks: Sequence[TrialTask]) -> Iterator[tuple[TrialTask, Trial]]:
        for task in tasks:
            if self.made >= self._most:
                raise TimeOverError
            yield task, self.make(task)

    def make(self, task: TrialTask) -> Trial:
        self.tasks.append(task)
        met = max(min(0.9 * self._capacity(task.layout, task.seed) / task.rate, 1.0), 0.0)
        return Trial(met, 1 - met, 0.0, 1.0, True, dict(SIMULATED) if task.keeps_result else None, most=met)

    def show(self, best: str) -> None:
        pass

    def rates(self, layout: Layout) -> list[float]:
        """The rates at which long trials of a layout were made."""
        return [task.rate for task in self.tasks if task.layout == layout and task.horizon == LONG]
