"""Moore-Hodgson with weights against all subsets, and against the dynamic programme of Algorithm 2's tests."""

import random
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import combinations
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampd.policies.estimates import as_job
from ampd.policies.moore_hodgson import Job, first_of_best_ordering, keep, weight_lost_to
from tests.ampd.policies.ordering.test_ampd import most_on_time
from tests.ampd.policies.routing_lab import SLO, round_of

TICK_S = 2.0**-10
"""Times are whole ticks, a power of two, so that sums are exact and due times can be met to the bit."""

untimed = settings(deadline=None)


def is_feasible(jobs: Sequence[Job]) -> bool:
    """Whether all are on time by due time: if they are not, they are in no order."""
    now_s = 0.0
    for due_s, time_s, _, _ in sorted(jobs):
        now_s += time_s
        if now_s > due_s:
            return False
    return True


def best_weight(jobs: Sequence[Job]) -> float:
    """The most weight that can be on time, by trying every subset."""
    subsets = (subset for size in range(len(jobs) + 1) for subset in combinations(jobs, size))
    return max(weight_of(subset) for subset in subsets if is_feasible(subset))


def weight_of(jobs: Sequence[Job]) -> float:
    return sum(weight for _, _, weight, _ in jobs)


@st.composite
def job_lists(draw: st.DrawFn, most: int, weights: st.SearchStrategy[float]) -> list[Job]:
    """Jobs of whole ticks that fit alone; weights are powers of two, so that sums are exact too."""
    jobs = []
    for position in range(draw(st.integers(0, most))):
        ticks = draw(st.integers(1, 12))
        due = ticks + draw(st.integers(0, 40))
        jobs.append(Job(due * TICK_S, ticks * TICK_S, draw(weights), position))
    return jobs


@untimed
@given(job_lists(9, st.sampled_from([1.0, 0.5, 0.25])))
def test_what_is_kept_is_on_time_by_due_time_and_the_weights_add_up(jobs: list[Job]) -> None:
    kept, given_up = keep(jobs)
    assert set(kept) <= set(jobs)
    assert len(set(kept)) == len(kept)
    assert is_feasible(kept)
    assert weight_of(kept) + given_up == weight_of(jobs)
    assert bool(kept) == bool(jobs)
    assert given_up >= weight_of(jobs) - best_weight(jobs)
    if is_feasible(jobs):
        assert given_up == 0.0
    assert keep(list(reversed(jobs)))[1] == given_up


@untimed
@given(job_lists(9, st.just(0.5)))
def test_with_equal_weights_no_subset_is_better(jobs: list[Job]) -> None:
    assert weight_of(keep(jobs)[0]) == best_weight(jobs)


@untimed
@given(job_lists(40, st.just(1.0)))
def test_with_equal_weights_no_ordering_of_a_long_queue_is_better(jobs: list[Job]) -> None:
    kept, given_up = keep(jobs)
    ticks = [(round(time_s / TICK_S), round(due_s / TICK_S)) for due_s, time_s, _, _ in jobs]
    assert len(kept) == most_on_time(ticks)
    assert given_up == len(jobs) - len(kept)


@untimed
@given(job_lists(12, st.just(1.0)))
def test_the_first_that_is_kept_begins_an_ordering_that_algorithm_2_could_choose(jobs: list[Job]) -> None:
    """Brought to the front of the queue, it is what Algorithm 2 takes: no ordering has more on time."""
    if not jobs:
        return
    first = min(keep(jobs)[0])
    queue = [first, *(job for job in jobs if job is not first)]
    assert first_of_best_ordering([job.time_s for job in queue], [job.due_s for job in queue]) == 0


def test_weights_decide_between_equals_and_time_counts_per_weight() -> None:
    missed = Job(10.0, 6.0, 0.5, 0)
    assert keep([missed, Job(10.0, 6.0, 1.0, 1)]) == ([Job(10.0, 6.0, 1.0, 1)], 0.5)
    # Twice as long and a bit: now it frees more for its weight.
    long = Job(20.0, 12.5, 1.0, 1)
    assert keep([missed, long, Job(20.0, 6.0, 1.0, 2)])[1] == 1.0
    # Several are given up for one that is worth more.
    cheap = [Job(1.0, 0.25, 0.25, position) for position in range(4)]
    assert keep([*cheap, Job(1.0, 0.75, 1.0, 4)])[1] == 0.75


def test_close_to_the_best_weight() -> None:
    """With several weights it is a heuristic: never better than the best subset, and on average nearly as good."""
    dice = random.Random(4)
    reached, best = 0.0, 0.0
    for _ in range(150):
        jobs = []
        for position in range(8):
            time_s = dice.uniform(0.1, 1.0)
            jobs.append(Job(time_s + dice.uniform(0.0, 4.0), time_s, dice.choice([1.0, 0.5]), position))
        reached += weight_of(keep(jobs)[0])
        best += best_weight(jobs)
    assert 0.97 * best < reached <= best


@untimed
@given(
    st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(0, 1e3), st.sampled_from([1.0, 0.5, 0.3])), min_size=1),
    st.booleans(),
)
@example([(0.056, 0.0, 0.5), (0.08, 0.0, 1.0)], False)
@example([(0.42, 0.0, 0.5), (0.628, 0.0, 1.0)], False)
def test_rounding_never_empties_a_queue(rows: list[tuple[float, float, float]], is_tight: bool) -> None:
    """A job whose due time is met to the last bit stays when all the others are given up."""
    jobs = [
        Job(time_s if is_tight else time_s + spare_s, time_s, weight, i)
        for i, (time_s, spare_s, weight) in enumerate(rows)
    ]
    kept, given_up = keep(jobs)
    assert kept
    assert weight_of(kept) + given_up == pytest.approx(weight_of(jobs))


@untimed
@given(
    st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(0, 3e3), st.sampled_from([1.0, 0.5, 0.3])), min_size=1),
    st.integers(0, 99),
)
def test_what_a_job_costs_is_the_difference_that_it_makes(rows: list[tuple[float, float, float]], which: int) -> None:
    """To the last bit, wherever the job is due among the others."""
    jobs = [Job(time_s + spare_s, time_s, weight, i) for i, (time_s, spare_s, weight) in enumerate(rows)]
    job = jobs.pop(which % len(jobs))
    assert weight_lost_to(job, jobs) == max(keep([*jobs, job])[1] - keep(jobs)[1], 0.0)


def plainly(jobs: Sequence[Job]) -> tuple[list[Job], float]:
    """`keep` as its module describes it, with each job through the heap."""
    kept: list[tuple[float, Job]] = []
    now_s = given_up = 0.0
    for job in sorted(jobs):
        is_first = not kept
        now_s += job.time_s
        heappush(kept, (-job.time_s / job.weight, job))
        while now_s > job.due_s and len(kept) > 1 and not is_first:
            _, lost = heappop(kept)
            now_s -= lost.time_s
            given_up += lost.weight
    return [job for _, job in kept], given_up


def test_a_long_queue_that_is_mostly_late_keeps_what_the_plain_algorithm_keeps() -> None:
    """Bit for bit: a decision must not depend on how the sums are made."""
    rng = random.Random(7)
    for _ in range(40):
        jobs = []
        for position in range(300):
            time_s = rng.lognormvariate(-3.0, 1.1)
            jobs.append(Job(time_s + rng.uniform(0.0, 1.0), time_s, rng.choice((1.0, 0.5)), position))
        kept, given_up = keep(jobs)
        expected, expected_up = plainly(jobs)
        assert (sorted(kept), given_up) == (sorted(expected), expected_up)
        assert given_up > 50


def test_nothing_to_keep() -> None:
    assert keep([]) == ([], 0.0)
    assert weight_lost_to(Job(1.0, 1.0, 1.0, 0), []) == 0.0


def test_a_prefill_as_a_job() -> None:
    task = round_of(100, 50, SLO, arrival_s=7.0)
    assert as_job(task, 3, 0.2, 7.25) == (pytest.approx(0.75), 0.2, 1.0, 3)
    assert as_job(replace(task, session_missed=True), 3, 0.2, 7.25).weight == 0.5
    assert as_job(task, 3, 0.2, inf).due_s == -inf
