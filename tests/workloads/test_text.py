"""Synthetic prompts: the wanted length, the same for the same seed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.endpoint import WORDS, synthetic_token_ids, synthetic_words


@settings(max_examples=20)
@given(st.integers(0, 200), st.text(max_size=5), st.integers(0, 300), st.integers(0, 50))
def test_prompts_have_their_length_and_range_and_depend_on_the_seed_alone(
    count: int, seed: str, first: int, width: int
) -> None:
    ids, words = synthetic_token_ids(count, seed, first, first + width), synthetic_words(count, seed)
    assert len(ids) == len(words.split()) == count
    assert set(ids) <= set(range(first, first + width + 1))
    assert set(words.split()) <= set(WORDS)
    assert (ids, words) == (synthetic_token_ids(count, seed, first, first + width), synthetic_words(count, seed))


def test_the_whole_range_is_used_and_seeds_differ() -> None:
    assert set(synthetic_token_ids(500, "s", 7, 10)) == {7, 8, 9, 10}
    assert synthetic_words(40, "a") != synthetic_words(40, "b")
