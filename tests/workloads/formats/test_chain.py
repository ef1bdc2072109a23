"""Rounds from the prompts of successive calls rebuild every prompt; rewrites keep what is known to be shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.formats.rounds import Call, common_prefix, rounds_of
from workloads.trace import Session

calls = st.builds(
    Call,
    prompt_tokens=st.integers(1, 300),
    output_tokens=st.integers(1, 50),
    gap_s=st.floats(-1, 5),
    hashes=st.lists(st.integers(0, 2), max_size=8),
    block_tokens=st.sampled_from([0, 16]),
    shared_tokens=st.none() | st.integers(0, 300),
)


@settings(max_examples=50)
@given(st.lists(calls, min_size=1, max_size=8))
def test_rounds_rebuild_every_prompt(given_calls: list[Call]) -> None:
    rounds = rounds_of(given_calls, "x")
    session = Session(session_id="s", arrival_s=0.0, rounds=rounds)
    for call, item, (history, increment) in zip(given_calls, rounds, session.prompts_tokens(), strict=True):
        assert history + increment == call.prompt_tokens
        assert item.incr_tokens >= 1
        assert item.output_tokens == call.output_tokens
        assert item.tool_s >= 0
    assert rounds[0].keep_tokens is None


@pytest.mark.parametrize(
    ("call", "keep_tokens"),
    [
        (Call(130, 5), None),  # longer than prompt and output: extends them
        (Call(105, 5), 100),  # longer than the prompt alone: the output was dropped
        (Call(90, 5), 0),  # shorter, and nothing is known to be shared
        (Call(90, 5, shared_tokens=60), 60),
        (Call(130, 5, shared_tokens=60), 60),
        (Call(100, 5, shared_tokens=100), 99),  # at least one token of a prompt is new
        (Call(130, 5, hashes=(1, 2, 9), block_tokens=16), 32),
        (Call(110, 5, cached_tokens=64), 64),  # a provider's cache tells, if the prompt is not longer than the context
        (Call(130, 5, cached_tokens=64), None),
        (Call(110, 5, cached_tokens=0, shared_tokens=100), 100),  # an expired entry says less than the words
        (Call(130, 5, cached_tokens=64, shared_tokens=10), 64),  # the words lack the system prompt, which the cache had
    ],
)
def test_a_rewritten_prompt_keeps_what_is_known_to_be_shared(call: Call, keep_tokens: int | None) -> None:
    first = Call(100, 20, hashes=(1, 2, 3, 4, 5, 6, 7), block_tokens=16)
    assert rounds_of([first, call], "x")[1].keep_tokens == keep_tokens


def test_a_call_without_tokens_is_named() -> None:
    with pytest.raises(UserError, match="x: call 1 has no prompt"):
        rounds_of([Call(1, 1), Call(0, 1)], "x")


def test_the_common_beginning_of_two_sequences() -> None:
    assert [common_prefix("abc", other) for other in ("", "abd", "abcd", "xbc")] == [0, 2, 3, 0]
