"""Which KV goes first, surplus tokens compared with trying every number, and what a session's next round needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import analytic_model
from ampd.serving.kv_eviction import TARGET_SHARE, Evictable, NextRounds, surplus
from ampd.types import Parallelism

MODEL = analytic_model("qwen3-32b", "h100")
TP2 = Parallelism(tp=2)


@given(
    context_tokens=st.integers(0, 3000),
    next_increment_tokens=st.integers(0, 2000),
    target_s=st.floats(0.0, 0.6),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_the_surplus_is_the_most_that_meets_the_target(
    context_tokens: int, next_increment_tokens: int, target_s: float, tp: int
) -> None:
    parallelism = Parallelism(tp)
    within = [
        dropped
        for dropped in range(context_tokens + 1)
        if MODEL.prefill_s(context_tokens - dropped, dropped + next_increment_tokens, parallelism) <= target_s
    ]
    got = surplus(context_tokens, next_increment_tokens, target_s, MODEL, parallelism)
    assert got == max(within, default=0)


@pytest.mark.parametrize(("target_s", "expected"), [(0.0, 0), (1e9, 20_000)])
def test_a_target_that_nothing_or_everything_meets(target_s: float, expected: int) -> None:
    assert surplus(20_000, 100, target_s, MODEL, Parallelism()) == expected


@given(increments=st.lists(st.integers(1, 3000), min_size=1, max_size=5), target_s=st.floats(0.01, 5.0))
def test_the_mean_increment_and_the_last_target_count(increments: list[int], target_s: float) -> None:
    rounds = NextRounds(MODEL, TP2)
    context_tokens = 0
    for increment in increments:
        context_tokens += increment
        rounds.begun("s", context_tokens, 99.0, None)
    rounds.begun("s", context_tokens, target_s, None)
    mean = sum(increments) // len(increments)
    expected = surplus(context_tokens, mean, TARGET_SHARE * target_s, MODEL, TP2)
    assert rounds.surplus(context_tokens, "s") == expected


def test_nothing_may_go_of_an_unknown_session() -> None:
    rounds = NextRounds(MODEL, TP2)
    rounds.begun("s", 100, 9.0, None)
    assert rounds.surplus(100, "other") == 0
    assert rounds.surplus(100, "s") == 100


def test_a_request_without_output_is_no_round() -> None:
    rounds = NextRounds(MODEL, TP2)
    rounds.begun("s", 100, 9.0, 0)
    assert rounds.surplus(100, "s") == 0
    rounds.begun("s", 100, 9.0, 1)
    assert rounds.surplus(100, "s") == 100


def test_only_the_latest_sessions_are_remembered() -> None:
    rounds = NextRounds(MODEL, TP2)
    for number in range(5000):
        rounds.begun(f"s{number}", 100, 9.0, None)
    assert rounds.surplus(100, "s0") == 0
    assert rounds.surplus(100, "s4999") == 100


def test_kv_of_no_session_goes_first_then_ends_that_can_be_computed_in_time_then_idle_sessions() -> None:
    left = {"unused": 2, "surplus": 3, "idle": 3}

    def drops(cause: str) -> Callable[[int], int]:
        def drop(wanted: int) -> int:
            dropped = min(wanted, left[cause])
            left[cause] -= dropped
            return dropped

        return drop

    evictable = Evictable(drops("unused"), drops("surplus"), drops("idle"))
    gone = [evictable.evict(2) for _ in range(4)]
    assert gone == [("unused", 2), ("surplus", 2), ("surplus", 1), ("idle", 2)]
    left["unused"] = 1
    assert [evictable.evict(2) for _ in range(2)] == [("unused", 1), ("idle", 1)]
    assert evictable.evict(2)[1] == 0


def test_what_the_last_idle_session_leaves_goes_at_once() -> None:
    left = [0]

    def unused(wanted: int) -> int:
        return min(wanted, left[0])

    def idle(_wanted: int) -> int:
        left[0] = 3  # the session shares all its KV, and is forgotten
        return 0

    assert Evictable(unused, lambda _: 0, idle).evict(2) == ("unused", 2)
