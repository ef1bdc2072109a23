"""Passes over admitted prefills: each token once, in order, and no pass above its size."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulator.prefilling import Prefilling
from planner.simulator.request import SimulatedRequest


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 350)), min_size=1, max_size=6),
    st.sampled_from([0, 1, 7, 64]),
    st.integers(1, 3),
)
def test_passes_compute_each_token_once_and_in_order(
    prompts: list[tuple[int, int]], chunk_tokens: int, at_once: int
) -> None:
    prefilling = Prefilling(chunk_tokens)
    coming = [
        SimulatedRequest(f"s{number}", tokens, min(cached, tokens), 1, None, lambda *_: None)
        for number, (tokens, cached) in enumerate(prompts)
    ]
    reached = {each: each.behind_tokens for each in coming}
    finished = []
    waiting = list(coming)
    while waiting or len(prefilling):
        for _ in range(at_once):
            if waiting:
                prefilling.add(waiting.pop(0))
        parts = prefilling.parts()
        assert sum(tokens for _, tokens in parts) <= chunk_tokens or not chunk_tokens
        assert all(tokens > 0 for _, tokens in parts)
        for sequence, (behind_tokens, tokens) in zip(prefilling, parts, strict=False):
            assert behind_tokens == reached[sequence]
            reached[sequence] += tokens
        done = prefilling.pop_done(parts)
        assert all(reached[each] == each.prompt_tokens for each in done)
        assert all(reached[each] < each.prompt_tokens for each in prefilling)
        finished += done
    assert finished == coming
