"""Which jobs of one machine to give up so that the others are on time (Moore-Hodgson).

Jobs run by due time. Whenever a job would be late, the job that frees the most time for the least weight is given up
(J. M. Moore, Management Science 15(1), 1968). With equal weights the fewest jobs are given up. With other weights this
is the usual heuristic for a problem that is NP-hard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heappushpop
from math import inf
from sys import maxsize
from typing import NamedTuple


class Job(NamedTuple):
    """A prefill as a job of its worker. Jobs sort by due time.

    Attributes:
        due_s: seconds until it is due.
        time_s: seconds that it takes.
        weight: what giving it up costs.
        position: in its queue.
    """

    due_s: float
    time_s: float
    weight: float
    position: int


_EqualJob = tuple[float, float, int]
"""Due time, time and position of a job where all weigh the same. A plain tuple, because it takes half the time."""


_Kept = list[tuple[float, float, float, float, int]]
"""Heap of the jobs that are kept: the negated time that each frees per weight, and its fields."""


def keep(jobs: Iterable[Job]) -> tuple[list[Job], float]:
    """(the jobs that are kept, the weight of those given up). Every job must fit alone."""
    kept: _Kept = []
    _, given_up = _go_on(sorted(jobs), kept, 0.0, 0.0)
    return [Job(due_s, time_s, weight, position) for _, due_s, time_s, weight, position in kept], given_up


def weight_lost_to(job: Job, jobs: Iterable[Job]) -> float:
    """The additional weight that is given up if `job` joins `jobs`. Every job must fit alone.

    It is the difference of two calls of `keep`, which share the jobs that are due before `job`. Mostly these are all
    jobs, because a new prefill is due last.
    """
    ordered = sorted(jobs)
    place = bisect_right(ordered, job)
    kept: _Kept = []
    now_s, given_up = _go_on(ordered[:place], kept, 0.0, 0.0)
    later = ordered[place:]
    _, without = _go_on(later, kept.copy(), now_s, given_up) if later else (now_s, given_up)
    _, with_it = _go_on([job, *later], kept, now_s, given_up)
    return max(with_it - without, 0.0)


def _go_on(jobs: Iterable[Job], kept: _Kept, now_s: float, given_up: float) -> tuple[float, float]:
    """Run further jobs, by due time, after those in `kept`, which end at `now_s`.

    Returns:
        (the end of those that are kept, the weight of those given up)
    """
    for due_s, time_s, weight, position in jobs:
        now_s += time_s
        # The last job fits alone, whatever rounding has made of the sum.
        if now_s <= due_s or not kept:
            heappush(kept, (-time_s / weight, due_s, time_s, weight, position))
            continue
        rank = -time_s / weight
        if rank < kept[0][0]:  # it frees the most itself; in a long queue that is most often so
            freed_s, lost = time_s, weight
        else:
            _, _, freed_s, lost, _ = heappushpop(kept, (rank, due_s, time_s, weight, position))
        now_s -= freed_s
        given_up += lost
        while now_s > due_s and len(kept) > 1:
            _, _, freed_s, lost, _ = heappop(kept)
            now_s -= freed_s
            given_up += lost
    return now_s, given_up


def first_of_best_ordering(times_s: Sequence[float], left_s: Sequence[float]) -> int:
    """First job of the lexicographically first ordering among those with the most jobs on time.

    The job at position i takes `times_s[i]` >= 0 seconds and is on time if it completes within `left_s[i]` seconds.
    Compare two orderings: "job i first, the others by Moore-Hodgson", and Moore-Hodgson alone. Some best ordering
    starts with job i exactly if both have as many jobs on time. So the answer is the first i for which this holds. Job
    i is not compared at all if an earlier job j failed that takes no longer and is due no later. In any ordering that
    starts with i, the two jobs can change places, and no job gets late.

    Returns:
        A position; 0 whenever the given order is already a best one.
    """
    jobs: list[_EqualJob] = []
    in_order = 0
    now_s = 0.0
    for position, time_s in enumerate(times_s):
        due_s = left_s[position]
        now_s += time_s
        if now_s <= due_s:
            in_order += 1
        if time_s <= due_s:  # otherwise late in every ordering
            jobs.append((due_s, time_s, position))
    if in_order == len(jobs):
        return 0
    jobs.sort()
    room_s = _least_slack_before(jobs)
    if room_s is not None:
        return _first_that_fits(times_s, room_s)
    late = _late(jobs)
    if in_order == len(jobs) - late:
        return 0
    return _first_that_makes_no_more_late(times_s, left_s, jobs, late)


def _late(jobs: Iterable[_EqualJob], start_s: float = 0.0, skipped: int = -1, allowed: int = maxsize) -> int:
    """How many jobs of equal weight are late in a best ordering. It stops when there are more than `allowed`.

    It is `keep` without weights, in half the time: a heap of times is enough, and one job at a time is given up.

    Args:
        jobs: by due time.
        start_s: when the first of them can begin.
        skipped: position of a job that is left out.
    """
    kept: list[float] = []  # negated times: the longest on top
    now_s, late = start_s, 0
    for due_s, time_s, position in jobs:
        if position == skipped:
            continue
        now_s += time_s
        if now_s > due_s:
            late += 1
            if late > allowed:
                break
            now_s += heappushpop(kept, -time_s)
        else:
            heappush(kept, -time_s)
    return late


def _least_slack_before(jobs: Sequence[_EqualJob]) -> dict[int, float] | None:
    """Run the jobs by due time. None: one is late. Else, by position, how long the jobs before it may be delayed.

    The entry under -1 is for all jobs.
    """
    room_s: dict[int, float] = {}
    now_s, least_s = 0.0, inf
    for due_s, time_s, position in jobs:
        room_s[position] = least_s
        now_s += time_s
        slack_s = due_s - now_s
        if slack_s < 0:
            return None
        if slack_s < least_s:
            least_s = slack_s
    room_s[-1] = least_s
    return room_s


def _first_that_fits(times_s: Sequence[float], room_s: dict[int, float]) -> int:
    for_late_s = room_s[-1]
    # The first job by due time delays no other job, so there is always one that fits.
    return next(i for i, time_s in enumerate(times_s) if time_s <= room_s.get(i, for_late_s))


def _first_that_makes_no_more_late(
    times_s: Sequence[float], left_s: Sequence[float], jobs: Sequence[_EqualJob], allowed: int
) -> int:
    failed: list[tuple[float, float]] = []
    for position, time_s in enumerate(times_s):
        # A job that is late anyway only delays the others, as if it were due at infinity.
        due_s = left_s[position] if time_s <= left_s[position] else inf
        for failed_time_s, failed_due_s in failed:
            if failed_time_s <= time_s and failed_due_s <= due_s:
                break
        else:
            if _late(jobs, time_s, position, allowed) <= allowed:
                return position
            failed.append((time_s, due_s))
    # The first job of a best set passes, unless a due time is met to the last bit and its sum is rounded otherwise.
    return 0
