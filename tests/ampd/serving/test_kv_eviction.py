"""Surplus tokens, compared with trying every number of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import analytic_model
from ampd.serving.kv_eviction import surplus
from ampd.types import Parallelism

MODEL = analytic_model("qwen3-32b", "h100")


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
