from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.policies.estimates import able, dispensable, fits, session_memory
from ampd.types import PrefillTask, Role, Slo, WorkerView

WORKER = WorkerView("w", Role.DECODE, kv_capacity_tokens=100, kv_used_tokens=40, max_context_tokens=80)


def task(hist: int, incr: int) -> PrefillTask:
    return PrefillTask("t", "s", hist, incr, 0.0, Slo(1.0, 0.1))


@pytest.mark.parametrize(
    ("sizes", "most_tokens"),
    [
        ({}, 60),
        ({"kv_used_tokens": 0}, 79),
        ({"max_context_tokens": 0}, 60),
        ({"kv_capacity_tokens": 0}, 79),
        ({"store_capacity_tokens": 500, "store_used_tokens": 450}, 50),
        ({"store_capacity_tokens": 500, "kv_used_tokens": 100}, 79),
        ({"store_capacity_tokens": 500, "max_context_tokens": 0}, 100),
        ({"kv_capacity_tokens": 0, "max_context_tokens": 0}, None),
    ],
)
def test_a_worker_takes_what_fits_into_its_memory_and_its_context(
    sizes: dict[str, int], most_tokens: int | None
) -> None:
    worker = replace(WORKER, **sizes)  # type: ignore[arg-type]
    if most_tokens is None:
        assert fits(worker, task(10**9, 10**9))
        return
    assert fits(worker, task(20, most_tokens - 20))
    assert not fits(worker, task(20, most_tokens - 19))


def test_sessions_are_kept_in_the_store_where_there_is_one() -> None:
    assert session_memory(WORKER) == (40, 100)
    assert session_memory(replace(WORKER, store_capacity_tokens=500, store_used_tokens=7)) == (7, 500)


def test_only_the_longest_context_counts_for_a_prefill_and_its_first_token() -> None:
    workers = [replace(WORKER, worker_id=str(size), max_context_tokens=size) for size in (0, 99, 100, 101)]
    assert [worker.worker_id for worker in able(task(60, 40), workers)] == ["0", "101"]


@given(st.lists(st.sampled_from([0, 10, 20, 30]), max_size=5))
def test_whoever_leaves_as_much_memory_stays(sizes: list[int]) -> None:
    """0 is unknown, and counts as the most."""
    decode = [replace(WORKER, worker_id=str(index), kv_capacity_tokens=size) for index, size in enumerate(sizes)]
    leaving = {worker.worker_id for worker in dispensable(decode)}
    for index, size in enumerate(sizes):
        others = [other or 999 for position, other in enumerate(sizes) if position != index]
        assert (str(index) in leaving) == any(other >= (size or 999) for other in others)
