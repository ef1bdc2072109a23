"""Which jobs of one machine to give up so that the rest is on time: weighted Moore-Hodgson.

Jobs run by due time. Whenever one would be late, the job that frees the most time for the least weight is given up
(J. M. Moore, Management Science 15(1), 1968; with equal weights the fewest jobs are given up, with others this is the
usual heuristic for a problem that is NP-hard).
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from ampd.types import PrefillTask

Job = tuple[float, float, float, int]
"""Seconds until it is due, seconds that it takes, weight, position in its queue."""


def job_of(task: PrefillTask, position: int, time_s: float, now_s: float, headroom: float, missed_weight: float) -> Job:
    """A prefill as a job: due when `headroom` of its TTFT target is over, worth less if its session has missed."""
    due_s = headroom * task.slo.ttft_s - (now_s - task.arrival_s)
    return due_s, time_s, missed_weight if task.session_missed else 1.0, position


def keep(jobs: Iterable[Job]) -> tuple[list[Job], float]:
    """(the jobs that are kept, the weight of those given up). Every job must fit alone."""
    kept: list[tuple[float, Job]] = []
    now_s, given_up = 0.0, 0.0
    for job in sorted(jobs):
        due_s, time_s, weight, _ = job
        now_s += time_s
        heappush(kept, (-time_s / weight, job))
        # The last one fits alone, whatever rounding has made of the sum.
        while now_s > due_s and len(kept) > 1:
            _, (_, freed_s, lost, _) = heappop(kept)
            now_s -= freed_s
            given_up += lost
    return [job for _, job in kept], given_up
