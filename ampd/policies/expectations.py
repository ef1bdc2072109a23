"""What the routing `predictive` expects of the ordering `on-time` and the slicing `slack`, defined once for all three.

The routing predicts what the other two do. Its predictions are only right while all of them take the same values.
"""

from __future__ import annotations

from collections.abc import Iterable

from ampd.policies.moore_hodgson import Job
from ampd.types import PrefillTask

ITL_SHARE = 0.92
"""Share of the ITL target that prefills may use up."""

ORDERED_PREFILLS = 128
"""Waiting prefills that the ordering looks at. Workers publish as many, and sums of the others, so that a view has at
most about 30 kB."""

MISSED_WEIGHT = 0.5
"""Weight of a round whose session has missed a target before: the session is lost in any case."""


def left_s(task: PrefillTask, now_s: float) -> float:
    """Seconds until a prefill's TTFT target is over."""
    return task.slo.ttft_s - (now_s - task.arrival_s)


def as_job(task: PrefillTask, position: int, time_s: float, now_s: float) -> Job:
    """A prefill that takes `time_s` seconds, as a job: a round whose session has missed a target weighs less."""
    return Job(left_s(task, now_s), time_s, MISSED_WEIGHT if task.session_missed else 1.0, position)


def on_time(tasks: Iterable[PrefillTask], times_s: Iterable[float], stretch: float, now_s: float) -> list[Job]:
    """The queued prefills that can still be on time, as jobs without positions.

    Args:
        times_s: seconds that each prefill takes alone.
        stretch: how many times longer than alone each prefill takes.
    """
    return [
        Job(due_s, time_s, MISSED_WEIGHT if task.session_missed else 1.0, 0)
        for task, alone_s in zip(tasks, times_s, strict=True)
        if (time_s := alone_s * stretch) <= (due_s := left_s(task, now_s))
    ]
