"""The steps of a sliced prefill: full pages, waits for the decode batch, and passes of several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.perf.presets import load_performance_model
from ampd.policies.base import Compute, Slice, Wait
from ampd.serving.picker import SHORTEST_WAIT_S
from ampd.serving.slices import ComputeTo, LookUp, Rest, Slices, SliceStep, left_after, with_held
from ampd.types import Parallelism, PrefillTask, Role, RunningRound, Slo
from tests.ampd.serving.fixed_slices import FixedSlices

MODEL = load_performance_model("tiny-cpu")
BATCH = [RunningRound(tokens=5, elapsed_s=0.1, itl_slo_s=0.05, context_tokens=100)]
PAGE = 16


def task(hist_tokens: int, incr_tokens: int, name: str = "t") -> PrefillTask:
    return PrefillTask(name, name, hist_tokens, incr_tokens, 0.0, Slo(1.0, 0.1), postponements=3)


def step(
    answer: Slice, *tasks: PrefillTask, beside: list[RunningRound] | None = None, is_exact: bool = True
) -> SliceStep:
    running = BATCH if beside is None else beside
    return Slices(FixedSlices(answer), MODEL, Parallelism(), PAGE, lambda: Role.DECODE).next(
        tasks, running, 1.0, is_exact=is_exact
    )


@pytest.mark.parametrize(
    ("tokens", "held", "end"),
    [
        (100, 320, 416),  # 420, but a page that is not full would be computed again
        (1, 320, 336),  # a page at least
        (16, 640, 656),
    ],
)
def test_a_slice_ends_with_a_full_page_and_adds_one_at_least(tokens: int, held: int, end: int) -> None:
    assert step(Compute(tokens), task(held, 1000 - held)) == ComputeTo(end)


@pytest.mark.parametrize("answer", [Compute(100), Wait(0.25)])
def test_a_prefill_that_is_not_computed_at_once_needs_the_history_that_is_really_held(answer: Slice) -> None:
    assert step(answer, task(320, 680), is_exact=False) == LookUp()
    assert step(Compute(680), task(320, 680), is_exact=False) == Rest()
    pair = task(160, 100, "a"), task(0, 300, "b")
    assert step(Wait(0.25), *pair, is_exact=False) == Wait(0.25), "a pass of several is never cut"


@pytest.mark.parametrize("tokens", [680, 681, 100_000])
def test_all_that_is_left_is_the_rest(tokens: int) -> None:
    assert step(Compute(tokens), task(320, 680)) == Rest()


def test_an_engine_that_shares_passes_gets_prefills_turn_by_turn() -> None:
    policy = FixedSlices(Wait(9.0), shares_passes=True)
    slices = Slices(policy, MODEL, Parallelism(), PAGE, lambda: Role.DECODE)
    assert slices.next([task(320, 680)], BATCH, 1.0, is_exact=True) == ComputeTo(416), "the engine waits, if it has to"
    assert slices.next([task(320, 680)], BATCH, 1.0, is_exact=False) == LookUp()
    assert slices.next([task(320, 100)], BATCH, 1.0, is_exact=True) == Rest()


def test_a_slice_whose_last_page_reaches_the_end_is_the_rest() -> None:
    assert step(Compute(1), task(320, 16)) == Rest()
    assert step(Compute(1), task(320, 17)) == ComputeTo(336)


def test_a_policy_that_waits_is_obeyed_while_a_round_decodes() -> None:
    assert step(Wait(0.25), task(0, 1000)) == Wait(0.25)
    assert step(Wait(0.25), task(0, 1000), beside=[]) == Rest(), "there is nothing to wait for"


@pytest.mark.parametrize("wait_s", [0.0, -0.01, 1e-300])
def test_a_wait_always_lets_time_pass(wait_s: float) -> None:
    assert step(Wait(wait_s), task(0, 1000)) == Wait(SHORTEST_WAIT_S)


def test_a_pass_of_several_is_not_cut_but_may_wait() -> None:
    pair = task(160, 100, "a"), task(0, 300, "b")
    assert step(Compute(16), *pair) == Rest()
    assert step(Wait(0.25), *pair) == Wait(0.25)
    assert step(Wait(0.25), *pair, beside=[]) == Rest()


def test_the_policy_sees_a_pass_as_one_prefill() -> None:
    policy = FixedSlices(Compute(1))
    Slices(policy, MODEL, Parallelism(2), PAGE, lambda: Role.MIXED).next(
        [task(160, 100, "a"), task(0, 300, "b")], BATCH, 7.0, is_exact=True
    )
    seen = policy.situation
    assert seen is not None
    assert (seen.task.hist_tokens, seen.task.incr_tokens) == (160 * 100 // 400, 400)
    assert (seen.running, seen.parallelism, seen.now_s, seen.model) == (BATCH, Parallelism(2), 7.0, MODEL)
    assert seen.role is Role.MIXED


@given(
    prompt=st.integers(1, 2000),
    known=st.integers(0, 2000),
    held=st.integers(0, 2000),
    page=st.sampled_from([1, 16, 64]),
    tokens=st.integers(1, 300),
)
def test_slices_end_and_each_begins_where_the_last_one_ended(
    prompt: int, known: int, held: int, page: int, tokens: int
) -> None:
    known = min(known, prompt - 1)
    left = with_held(task(known, prompt - known), held, page)
    assert left.hist_tokens % page == 0
    assert left.hist_tokens <= held
    slices = Slices(FixedSlices(Compute(tokens)), MODEL, Parallelism(), page, lambda: Role.DECODE)
    while isinstance(chosen := slices.next([left], BATCH, 0.0, is_exact=True), ComputeTo):
        assert left.hist_tokens < chosen.end_tokens < prompt
        assert chosen.end_tokens % page == 0
        assert chosen.end_tokens - left.hist_tokens <= max(tokens, page)
        left = left_after(left, chosen.end_tokens)
        assert (left.context_tokens, left.postponements) == (prompt, 3)
    assert isinstance(chosen, Rest)
    assert left.incr_tokens >= 1
