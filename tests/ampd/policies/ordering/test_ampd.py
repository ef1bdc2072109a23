"""Algorithm 2 against enumeration and against a dynamic programme that shares no idea with Moore-Hodgson's rule."""

import random
from collections.abc import Sequence
from datetime import date
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.profile import (
    DecodeCurve,
    DecodeSegment,
    ParallelismCurves,
    PerformanceProfile,
    PrefillCurve,
    PrefillSegment,
    Provenance,
)
from ampd.policies.base import Pick, Run
from ampd.policies.moore_hodgson import first_of_best_ordering
from ampd.policies.registry import create
from ampd.types import Parallelism, PrefillTask, Slo
from tests.ampd.policies import situations

TP1 = Parallelism(1)
NOW_S = 64.0
TICK_S = 2.0**-10
"""One token takes one tick, a power of two, so that sums of times are exact and due times can be met to the bit."""


def exact_model() -> PiecewiseModel:
    segment = PrefillSegment(from_incr_tokens=0, alpha_s=0, beta_s_per_token=TICK_S, gamma_s_per_token2=0)
    decode = DecodeCurve(
        context_s_per_token=0, segments=(DecodeSegment(from_batch=0, alpha_s=0, beta_s_per_sequence=0),)
    )
    return PiecewiseModel(
        PerformanceProfile(
            provenance=Provenance(
                kind="analytic", source="test", model="none", gpu="none", date=date(2026, 1, 1), method="exact ticks"
            ),
            workers=(ParallelismCurves(tp=1, prefill=PrefillCurve(segments=(segment,)), decode=decode),),
        )
    )


MODEL = exact_model()
Row = tuple[int, int, int, int]
"""Ticks that a task takes, has waited, and may wait in total; postponements."""


def task(number: int, row: Row) -> PrefillTask:
    ticks, waited, target, postponements = row
    slo = Slo(target * TICK_S, 0.1)
    return PrefillTask(f"t{number}", f"s{number}", 0, ticks, NOW_S - waited * TICK_S, slo, postponements)


def pick(rows: Sequence[Row], window: int) -> Pick:
    queue = [task(i, row) for i, row in enumerate(rows)]
    return situations.pick(create("ordering", "ampd", window=window), queue, TP1, MODEL, NOW_S, random.Random(0))


def pick_by_enumeration(rows: Sequence[Row], window: int) -> int:
    head = rows[:window]
    # The rule for inputs whose counts grow along the queue: a task before one at the limit is at the limit too.
    last_at_limit = max((i for i, row in enumerate(head) if row[3] >= window), default=-1)
    best, best_on_time = None, -1
    for ordering in permutations(range(len(head))):
        overtakes = any(
            overtaken <= last_at_limit and ordering.index(later) < ordering.index(overtaken)
            for later in range(len(head))
            for overtaken in range(later)
        )
        if overtakes:
            continue
        now, on_time = 0, 0
        for position in ordering:
            ticks, waited, target, _ = head[position]
            now += ticks
            on_time += waited + now <= target
        if on_time > best_on_time:
            best, best_on_time = ordering, on_time
    assert best is not None
    return best[0]


def most_on_time(jobs: Sequence[tuple[int, int]], start: int = 0) -> int:
    """Least total time for every number of on-time jobs, by due time; jobs are (ticks, due)."""
    least: dict[int, int] = {0: start}
    for ticks, due in sorted(jobs, key=lambda job: job[1]):
        for count in sorted(least, reverse=True):
            end = least[count] + ticks
            if end <= due and end < least.get(count + 1, end + 1):
                least[count + 1] = end
    return max(least)


def most_on_time_with_first(jobs: Sequence[tuple[int, int]], first: int) -> int:
    ticks, due = jobs[first]
    return (ticks <= due) + most_on_time([*jobs[:first], *jobs[first + 1 :]], start=ticks)


def jobs_of(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return [(ticks, target - waited) for ticks, waited, target, _ in rows]


def rows(max_size: int, postponements: st.SearchStrategy[int]) -> st.SearchStrategy[list[Row]]:
    row = st.tuples(st.integers(0, 12), st.integers(0, 25), st.integers(0, 50), postponements)
    return st.lists(row, min_size=1, max_size=max_size)


@settings(max_examples=25)
@given(rows(7, st.just(0)), st.integers(1, 8))
@example([(5, 0, 3, 0), (2, 0, 2, 0)], 3)  # the head has no chance: what can still be on time goes first
@example([(4, 0, 9, 0), (4, 0, 4, 0)], 3)  # both on time only if they change places
def test_pick_equals_enumeration(rows: list[Row], window: int) -> None:
    found = pick(rows, window)
    assert found.index == pick_by_enumeration(rows, window)
    assert found.postponed == tuple(range(found.index))


def test_pick_equals_enumeration_under_pressure() -> None:
    rng = random.Random(3)
    moved = 0
    for _ in range(300):
        size = rng.randint(4, 6)
        rows = [(rng.randint(0, 12), rng.randint(0, 20), rng.randint(0, 40), rng.randint(0, 2)) for _ in range(size)]
        found = pick(rows, size)
        assert found.index == pick_by_enumeration(rows, size)
        moved += found.index > 0
    assert moved > 50


@settings(max_examples=25)
@given(rows(6, st.integers(0, 5)), st.integers(1, 6))
def test_pick_equals_enumeration_under_the_limit(rows: list[Row], window: int) -> None:
    assert pick(rows, window).index == pick_by_enumeration(rows, window)


@settings(max_examples=25)
@given(rows(6, st.just(0)))
def test_the_dynamic_programme_counts_as_enumeration_does(rows: list[Row]) -> None:
    jobs = jobs_of(rows)
    counts: dict[int, int] = {}
    for ordering in permutations(range(len(jobs))):
        now, on_time = 0, 0
        for position in ordering:
            now += jobs[position][0]
            on_time += now <= jobs[position][1]
        counts[ordering[0]] = max(counts.get(ordering[0], 0), on_time)
    assert most_on_time(jobs) == max(counts.values())
    assert [most_on_time_with_first(jobs, first) for first in range(len(jobs))] == [counts[i] for i in sorted(counts)]


def expected_first(jobs: Sequence[tuple[int, int]]) -> int:
    best = most_on_time(jobs)
    return next(first for first in range(len(jobs)) if most_on_time_with_first(jobs, first) == best)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-40, 250)), min_size=8, max_size=32))
def test_large_windows_equal_the_dynamic_programme(jobs: list[tuple[int, int]]) -> None:
    assert first_of_best_ordering([job[0] for job in jobs], [job[1] for job in jobs]) == expected_first(jobs)


@pytest.mark.parametrize("targets", ["one", "tight", "own", "late", "contrary"])
def test_large_windows_under_pressure_equal_the_dynamic_programme(targets: str) -> None:
    rng = random.Random(targets)
    for _ in range(150):
        size = rng.randint(8, 32)
        times = [min(400, int(rng.lognormvariate(3, 1))) for _ in range(size)]
        total = sum(times)
        dues = {
            "one": lambda i: int(total * (0.2 + 0.6 * i / size)),  # noqa: B023
            "tight": lambda i: times[i] + rng.randint(0, total // 6),  # noqa: B023
            "own": lambda _: rng.randint(-total // 10, total),  # noqa: B023
            "late": lambda i: int(total * (i / size - 0.6)),  # noqa: B023
            "contrary": lambda i: int(total * (1 - i / size) * 0.8),  # noqa: B023
        }[targets]
        jobs = [(time, dues(i)) for i, time in enumerate(times)]
        if targets == "contrary":
            jobs = [(time, due) for time, (_, due) in zip(sorted(times), jobs, strict=True)]
        assert first_of_best_ordering([job[0] for job in jobs], [job[1] for job in jobs]) == expected_first(jobs)


def test_a_queue_without_pressure_stays_in_order_of_arrival() -> None:
    assert pick([(30, 5, 1000, 0), (1, 4, 1000, 0), (2, 3, 900, 0)], 3) == Run(0)


def test_a_queue_without_hope_stays_in_order_of_arrival() -> None:
    assert pick([(30, 50, 10, 0), (1, 40, 10, 0), (2, 30, 10, 0)], 3) == Run(0)


def test_only_the_window_is_looked_at() -> None:
    rows = [(9, 0, 9, 0), (9, 0, 5, 0), (9, 0, 5, 0), (1, 0, 1, 0)]
    assert pick(rows, 3).index == 0
    assert pick([(9, 0, 4, 0), *rows[1:]], 4).index == 3


def test_a_task_at_the_limit_is_not_overtaken() -> None:
    rows = [(9, 0, 3, 2), (1, 0, 1, 0)]
    assert pick(rows, 3) == Run(1, (0,))
    assert pick([(9, 0, 3, 3), *rows[1:]], 3) == Run(0)
    assert pick([(9, 0, 3, 0), (9, 0, 3, 3), (1, 0, 1, 0)], 3) == Run(0)


@settings(max_examples=25)
@given(st.integers(2, 6), rows(20, st.just(0)), st.randoms(use_true_random=False))
def test_no_task_starves_and_counts_never_grow_along_the_queue(
    window: int, rows: list[Row], rng: random.Random
) -> None:
    policy = create("ordering", "ampd", window=window)
    waiting: list[tuple[PrefillTask, int]] = []
    coming = [task(i, row) for i, row in enumerate(rows)]
    done = 0
    while coming or waiting:
        while coming and (not waiting or rng.random() < 0.6):
            waiting.append((coming.pop(0), 0))
        queue = [
            PrefillTask(t.task_id, t.session_id, 0, t.incr_tokens, t.arrival_s, t.slo, count) for t, count in waiting
        ]
        chosen = situations.pick(policy, queue, TP1, MODEL, NOW_S, rng)
        waiting = [(t, count + (i in chosen.postponed)) for i, (t, count) in enumerate(waiting) if i != chosen.index]
        done += 1
        counts = [count for _, count in waiting]
        assert counts == sorted(counts, reverse=True)
        assert max(counts, default=0) <= window
    assert done == len(rows)


def test_the_model_is_asked_once_for_each_task_of_the_window() -> None:
    asked: list[int] = []

    class Counting(PiecewiseModel):
        def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
            asked.append(incr_tokens)
            return super().prefill_s(hist_tokens, incr_tokens, parallelism)

    queue = [task(i, (i + 1, 5, 9, 0)) for i in range(40)]
    situations.pick(create("ordering", "ampd", window=32), queue, TP1, Counting(MODEL.profile), NOW_S, random.Random(0))
    assert asked == list(range(1, 33))


def test_fcfs_takes_the_head() -> None:
    queue = [task(0, (9, 9, 1, 0)), task(1, (1, 0, 1, 0))]
    assert situations.pick(create("ordering", "fcfs"), queue, TP1, MODEL, NOW_S, random.Random(0)) == Run(0)
