"""Passes over admitted prefills: each token once, in order, and no pass above its size."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.keys import PAGE_TOKENS
from ampd.types import PrefillTask
from planner.simulator.request import Part, Prefilling, SimulatedRequest

from .lab import SLO

PROMPTS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 350)), min_size=1, max_size=6)


def requests(prompts: Sequence[tuple[int, int]]) -> list[SimulatedRequest]:
    """Requests of (tokens, cached tokens) each."""
    made = []
    for number, (tokens, cached) in enumerate(prompts):
        request = SimulatedRequest(f"s{number}", tokens, min(cached, tokens), 1, None, lambda *_: None)
        request.task = PrefillTask(f"s{number}/0", f"s{number}", 0, tokens, 0.0, SLO)
        made.append(request)
    return made


def handed_over(name: str, missing_tokens: int) -> SimulatedRequest:
    request = SimulatedRequest(name, 100, 100 - missing_tokens, 5, None, lambda *_: None)
    request.hand_over(0.0)
    request.task = PrefillTask(f"{name}/0", name, 0, 99, 0.0, SLO)
    return request


@settings(max_examples=30)
@given(PROMPTS, st.integers(1, 3))
def test_passes_compute_each_token_once_and_in_order(prompts: list[tuple[int, int]], at_once: int) -> None:
    prefilling, coming = Prefilling(PAGE_TOKENS), requests(prompts)
    reached = {each: each.prompt_tokens - each.left_tokens for each in coming}
    finished = []
    waiting = list(coming)
    while waiting or len(prefilling):
        for _ in range(at_once):
            if waiting:
                prefilling.add(waiting.pop(0))
        parts = prefilling.begin(10_000)
        count(prefilling, parts, reached)
        done = prefilling.end()
        assert all(reached[each] == each.prompt_tokens for each in done)
        assert all(reached[each] < each.prompt_tokens for each in prefilling)
        finished += done
    assert {id(each) for each in finished} == {id(each) for each in coming}


@settings(max_examples=30)
@given(PROMPTS, st.lists(st.sampled_from([16, 32, 160]), min_size=1), st.integers(1, 3))
def test_passes_beside_a_batch_compute_each_token_once(
    prompts: list[tuple[int, int]], sizes: list[int], at_once: int
) -> None:
    prefilling, waiting = Prefilling(PAGE_TOKENS), requests(prompts)
    reached = {each: each.prompt_tokens - each.left_tokens for each in waiting}
    turn = 0
    while waiting or len(prefilling):
        for _ in range(at_once):
            if waiting:
                prefilling.add(waiting.pop(0))
        left_tokens, oldest = prefilling.left_tokens, prefilling.oldest
        assert left_tokens == sum(each.prompt_tokens - reached[each] for each in prefilling)
        first = next(iter(prefilling))
        assert oldest is not None
        assert (oldest.hist_tokens, oldest.incr_tokens) == (reached[first], first.prompt_tokens - reached[first])
        size = sizes[turn % len(sizes)]
        parts = prefilling.begin(size)
        pages_tokens = sum(-(-tokens // PAGE_TOKENS) * PAGE_TOKENS for _, tokens in parts)
        assert pages_tokens == size or sum(tokens for _, tokens in parts) == left_tokens
        count(prefilling, parts, reached)
        assert all(reached[each] == each.prompt_tokens for each in prefilling.end())
        turn += 1
    assert all(reached[each] == each.prompt_tokens for each in reached)


def test_rounds_that_were_prefilled_elsewhere_come_first_and_do_not_count() -> None:
    prefilling, (long,) = Prefilling(PAGE_TOKENS), requests([(300, 0)])
    prefilling.add(long)
    assert prefilling.begin(64) == [(0, 64)]
    prefilling.end()
    prefilling.add(handed_over("late", 9))
    assert prefilling.begin(64) == [(91, 9), (64, 64)]
    assert [request.session_id for request in prefilling.end()] == ["late"]
    prefilling.add(handed_over("later", 7))
    assert prefilling.begin(0) == [(93, 7)], "they do not wait where a prefill has to"
    prefilling.end()
    assert prefilling.begin(0) == []
    assert (prefilling.left_tokens, len(prefilling)) == (172, 1)


def test_a_round_whose_kv_was_lost_on_the_way_is_a_prefill() -> None:
    prefilling = Prefilling(PAGE_TOKENS)
    prefilling.add(handed_over("lost", 100))
    assert prefilling.begin(0) == []
    assert prefilling.begin(64) == [(0, 64)]
    prefilling.end()
    assert prefilling.oldest == PrefillTask("lost/0", "lost", 64, 36, 0.0, SLO)
    assert prefilling.begin(16) == [(64, 16)], "also when it lacks a page only"
    assert prefilling.left_tokens == 36


def count(prefilling: Prefilling, parts: list[Part], reached: dict[SimulatedRequest, int]) -> None:
    """Add a pass to what is reached."""
    assert len(parts) == len(prefilling.in_pass)
    for (request, tokens), (behind_tokens, part_tokens) in zip(prefilling.in_pass, parts, strict=True):
        assert tokens == part_tokens > 0
        assert behind_tokens == reached[request]
        reached[request] += tokens
