"""Work on several processes: results in the order of the items, whatever the number of processes."""

from __future__ import annotations

import os

import pytest

from planner.parallel import in_parallel


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_the_items(jobs: int) -> None:
    found = in_parallel(square, range(9), "squares", jobs)
    assert [number for number, _ in found] == [number * number for number in range(9)]
    assert ({process for _, process in found} == {os.getpid()}) == (jobs == 1)


def test_one_item_needs_no_process() -> None:
    assert in_parallel(square, [3], "squares", 4) == [(9, os.getpid())]
    assert in_parallel(square, [], "squares", 4) == []
