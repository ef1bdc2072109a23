"""The next pass: what the policy says, in full pages, which prefills get it, and whether it is a step of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.model import PerformanceModel
from ampd.perf.presets import load_performance_model
from ampd.serving.pass_sizes import NextPass, PassSizes, divided, is_taken_over
from ampd.types import Parallelism, PrefillTask, Role, RunningRound, Slo
from tests.ampd.serving.fixed_slices import FixedSlices

PLAIN, MIXING = load_performance_model("tiny-cpu"), load_performance_model("qwen3-32b-h20")
BATCH = [RunningRound(tokens=5, elapsed_s=0.1, itl_slo_s=0.05, context_tokens=100)]
OLDEST = PrefillTask("t", "t", 320, 200, 0.0, Slo(1.0, 0.1))
PAGE = 16


def chosen(
    answer: int,
    left_tokens: int = 500,
    running: Sequence[RunningRound] = BATCH,
    model: PerformanceModel = PLAIN,
    **known: Any,
) -> NextPass:
    sizes = PassSizes(FixedSlices(answer), model, Parallelism(), PAGE)
    return sizes.next(OLDEST if left_tokens else None, left_tokens, running, 2.0, **known)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(100, 96), (96, 96), (1, 16), (499, 496), (500, 500), (9000, 500)],
)
def test_a_pass_takes_full_pages_or_all_that_is_left(tokens: int, expected: int) -> None:
    assert chosen(tokens) == NextPass(expected)
    assert chosen(tokens, model=MIXING) == NextPass(expected, is_mixed=True)
    assert chosen(tokens, running=[]) == NextPass(expected)


def test_a_policy_may_want_a_step_of_the_batch_alone() -> None:
    assert chosen(0) == chosen(0, model=MIXING) == NextPass(0)
    assert chosen(0, running=[]) == NextPass(16), "there is nothing to wait for"


def test_the_batch_makes_a_step_after_it_has_paused() -> None:
    assert chosen(96, has_paused=True) == NextPass(0)
    assert chosen(96, has_paused=True, model=MIXING) == NextPass(96, is_mixed=True)
    assert chosen(96, has_paused=True, running=[]) == NextPass(96)


def test_rounds_that_were_handed_over_go_along_or_alone() -> None:
    assert chosen(96, handed_over=[1, 9]) == NextPass(96)
    assert chosen(0, handed_over=[1, 9], model=MIXING) == NextPass(0, is_mixed=True)
    assert chosen(0, 0, handed_over=[1]) == NextPass(0)
    assert chosen(0, 0, handed_over=[1], model=MIXING) == NextPass(0, is_mixed=True)


def test_a_prefill_without_targets_is_computed_whole() -> None:
    sizes = PassSizes(FixedSlices(16), PLAIN, Parallelism(), PAGE)
    assert sizes.next(None, 500, BATCH, 2.0) == NextPass(500)


def test_the_policy_sees_all_that_is_left_as_one_prefill() -> None:
    policy = FixedSlices(1)
    PassSizes(policy, MIXING, Parallelism(2), PAGE, lambda: Role.MIXED).next(OLDEST, 500, BATCH, 7.0)
    seen = policy.situation
    assert seen is not None
    assert (seen.task.hist_tokens, seen.task.incr_tokens, seen.task.slo) == (320, 500, OLDEST.slo)
    assert (seen.running, seen.parallelism, seen.now_s, seen.model) == (BATCH, Parallelism(2), 7.0, MIXING)
    assert seen.role is Role.MIXED


@pytest.mark.parametrize(
    ("is_handed_over", "missing_tokens", "expected"),
    [(True, 1, True), (True, PAGE + 1, True), (True, PAGE + 2, False), (False, 1, False)],
)
def test_a_round_is_taken_over_if_its_kv_has_come(is_handed_over: bool, missing_tokens: int, expected: bool) -> None:
    assert is_taken_over(is_handed_over, missing_tokens, PAGE) is expected


def test_shorter_prefills_that_fit_come_before_the_oldest() -> None:
    assert divided([300, 40, 20], 128, PAGE) == [(2, 20), (1, 40), (0, 48)]
    assert divided([300, 120], 128, PAGE) == [(0, 128)], "the oldest keeps a page"
    assert divided([30, 40], 80, PAGE) == [(0, 30), (1, 40)], "no longer one comes before it"
    assert divided([30, 400], 128, PAGE) == [(0, 30), (1, 96)]
    assert divided([30, 400], 0, PAGE) == []


def test_a_pass_is_full_with_the_pages_of_its_prefills() -> None:
    assert divided([100, 5], 32, PAGE) == [(1, 5), (0, 16)]
    assert divided([100, 5, 5], 32, PAGE) == [(1, 5), (0, 16)]
    assert divided([100, 5, 5], 110, PAGE) == [(1, 5), (2, 5), (0, 100)], "all that is left"


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 31))
def test_a_pass_takes_all_or_cuts_the_last_one_between_pages(left: list[int], most_pages: int) -> None:
    most_tokens = most_pages * PAGE
    taken = divided(left, most_tokens, PAGE)
    pages = sum(-(-tokens // PAGE) for _, tokens in taken)
    assert pages == most_pages or sum(tokens for _, tokens in taken) == sum(left)
    assert len({index for index, _ in taken}) == len(taken)
    assert all(tokens == left[index] for index, tokens in taken[:-1])
    assert all(tokens == left[index] or not tokens % PAGE for index, tokens in taken)
    assert all(0 < tokens <= left[index] for index, tokens in taken)
    if most_pages:
        assert 0 in {index for index, _ in taken}, "the oldest one is in each pass"
