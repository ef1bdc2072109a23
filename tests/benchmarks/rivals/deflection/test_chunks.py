"""The schedule of chunks: largest that fit, and what it takes altogether."""

from math import inf

import pytest
from ampd_rivals.deflection.chunks import chunked_s, largest_chunk_tokens
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.types import Parallelism
from tests.ampd.policies.routing_lab import PLAIN, PlainModel, queue_of, round_of

MODEL = load_performance_model("qwen3-32b-h20")
TP4 = Parallelism(4)


@given(st.integers(0, 60_000), st.integers(1, 5000), st.floats(-0.01, 1.0), st.integers(0, 6000))
def test_the_largest_chunk_fits_and_one_token_more_does_not(hist: int, left: int, limit_s: float, guess: int) -> None:
    tokens = largest_chunk_tokens(hist, left, limit_s, TP4, MODEL, guess)
    assert 0 <= tokens <= left
    if tokens:
        assert MODEL.prefill_s(hist, tokens, TP4) <= limit_s
    if tokens < left:
        assert MODEL.prefill_s(hist, tokens + 1, TP4) > limit_s


def test_a_good_guess_saves_the_search() -> None:
    asked = []

    class Counting(PlainModel):
        def prefill_s(self, hist_tokens: int, incr_tokens: int, parallelism: Parallelism) -> float:
            asked.append(incr_tokens)
            return super().prefill_s(hist_tokens, incr_tokens, parallelism)

    assert largest_chunk_tokens(0, 100_000, 0.5104, TP4, Counting(), 500) == 500
    assert len(asked) == 3
    for guess in (1, 50_000, 99_999):
        asked.clear()
        assert largest_chunk_tokens(0, 100_000, 0.5104, TP4, Counting(), guess) == 500
        assert len(asked) <= 28, guess


def test_each_chunk_waits_for_a_step_and_pays_for_a_pass() -> None:
    # Room for 40 - 10 = 30 ms: 20 tokens a chunk; 50 tokens are 20 + 20 + 10, with three steps of 10 ms.
    assert chunked_s([round_of(0, 50)], 0.01, 0.04, inf, TP4, PLAIN) == pytest.approx(0.03 + 0.03 + 0.02 + 3 * 0.01)


def test_an_idle_worker_runs_it_whole() -> None:
    assert chunked_s([round_of(0, 5000)], 0.0, 0.04, inf, TP4, PLAIN) == pytest.approx(5.01)


def test_there_is_no_schedule_of_chunks_below_the_floor_except_for_the_rest() -> None:
    # Room for 25.5 ms: 15 tokens a chunk.
    assert chunked_s([round_of(0, 50)], 0.01, 0.0355, inf, TP4, PLAIN) == inf
    assert chunked_s([round_of(0, 15)], 0.01, 0.0355, inf, TP4, PLAIN) == pytest.approx(0.035)
    assert chunked_s([round_of(0, 1)], 0.04, 0.04, inf, TP4, PLAIN) == inf


def test_it_stops_counting_where_it_is_too_slow_anyway() -> None:
    assert 0.1 <= chunked_s(queue_of(5000, 5000), 0.01, 0.04, 0.1, TP4, PLAIN) < 0.2


@given(st.lists(st.integers(1, 900), min_size=1, max_size=4), st.floats(0.001, 0.03), st.floats(0.03, 0.2))
def test_a_looser_target_is_never_slower_and_nothing_beats_the_whole(
    lengths: list[int], step_s: float, itl_s: float
) -> None:
    tasks = queue_of(*lengths)
    strict, loose = (chunked_s(tasks, step_s, target, inf, TP4, PLAIN) for target in (itl_s, 2 * itl_s))
    assert loose <= strict + 1e-9
    assert loose >= chunked_s(tasks, 0.0, itl_s, inf, TP4, PLAIN) - 1e-9
