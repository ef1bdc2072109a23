"""Exact scheduling of one machine for the most jobs on time (1 || sum U_j), as fast as a queue needs it.

Moore and Hodgson (J. M. Moore, Management Science 15(1), 1968): take the jobs by due time; whenever one completes too
late, drop the longest taken so far. What remains is a largest set of jobs that can all be on time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heappushpop
from math import inf

Job = tuple[float, float, int]
"""Due time, processing time, position in the queue: sorts by due time."""


def first_of_best_ordering(times_s: Sequence[float], left_s: Sequence[float]) -> int:
    """First job of the lexicographically first ordering among those with the most jobs on time.

    The job at position i takes `times_s[i]` >= 0 seconds and is on time if it completes within `left_s[i]` seconds.
    An ordering that starts with job i can be best exactly if "i first, the rest by Moore-Hodgson" has as many jobs on
    time as Moore-Hodgson alone, so the answer is the first i for which that holds. Job i is not compared at all if an
    earlier j failed that takes no longer and is due no later: in any ordering that starts with i, j can take its place
    and i that of j, and no job gets late.

    Returns:
        A position; 0 whenever the given order is already a best one.
    """
    live: list[Job] = []
    in_order = 0
    now_s = 0.0
    for position, time_s in enumerate(times_s):
        due_s = left_s[position]
        now_s += time_s
        if now_s <= due_s:
            in_order += 1
        if time_s <= due_s:  # otherwise late in every ordering
            live.append((due_s, time_s, position))
    if in_order == len(live):
        return 0
    live.sort()
    room_s = _least_slack_before(live)
    if room_s is not None:
        return _first_that_fits(times_s, room_s)
    dropped = _dropped(live)
    if in_order == len(live) - dropped:
        return 0
    return _first_that_drops_no_more(times_s, left_s, live, dropped)


def _least_slack_before(live: Sequence[Job]) -> dict[int, float] | None:
    """If all jobs are on time by due time: for each, how much the jobs before it can be delayed; -1 is for all."""
    room_s: dict[int, float] = {}
    now_s, least_s = 0.0, inf
    for due_s, time_s, position in live:
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
    # The first job by due time delays nobody, so there is always one that fits.
    return next(i for i, time_s in enumerate(times_s) if time_s <= room_s.get(i, for_late_s))


def _dropped(live: Sequence[Job]) -> int:
    """How many of the jobs are late in a best ordering (Moore-Hodgson)."""
    kept: list[float] = []  # negated times: the longest on top
    now_s, dropped = 0.0, 0
    for due_s, time_s, _ in live:
        now_s += time_s
        if now_s > due_s:
            now_s += heappushpop(kept, -time_s)
            dropped += 1
        else:
            heappush(kept, -time_s)
    return dropped


def _first_that_drops_no_more(
    times_s: Sequence[float], left_s: Sequence[float], live: Sequence[Job], allowed: int
) -> int:
    failed: list[tuple[float, float]] = []
    for position, time_s in enumerate(times_s):
        # A job that is late anyway only delays the others, which is what being due at infinity says.
        due_s = left_s[position] if time_s <= left_s[position] else inf
        for failed_time_s, failed_due_s in failed:
            if failed_time_s <= time_s and failed_due_s <= due_s:
                break
        else:
            if _drops_no_more(live, position, time_s, allowed):
                return position
            failed.append((time_s, due_s))
    # The first job of a best set passes, unless a due time is met to the last bit and its sum is rounded otherwise.
    return 0


def _drops_no_more(live: Sequence[Job], first: int, first_time_s: float, allowed: int) -> bool:
    """Whether at most `allowed` of the jobs get late when job `first` runs before all others (Moore-Hodgson)."""
    kept: list[float] = []
    now_s = first_time_s
    for due_s, time_s, position in live:
        if position == first:
            continue
        now_s += time_s
        if now_s > due_s:
            if not allowed:
                return False
            allowed -= 1
            now_s += heappushpop(kept, -time_s)
        else:
            heappush(kept, -time_s)
    return True
