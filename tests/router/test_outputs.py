from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.outputs import ends_at_prefill, error_chunk, first_chunk, merged_usage

EOS = frozenset({3, 4})


def ends(
    chunk: dict[str, Any],
    stop_token_ids: frozenset[int] = EOS,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    prompt_tokens: int = 10,
    context_limit: int = 0,
) -> str | None:
    return ends_at_prefill(chunk, stop_token_ids, max_tokens, min_tokens, prompt_tokens, context_limit)


def test_a_first_token_goes_on() -> None:
    assert ends({"token_ids": [9]}) is None
    assert ends({"token_ids": [9], "finish_reason": "length"}, max_tokens=2) is None


def test_a_stop_token_ends_the_round_unless_it_is_ignored_or_too_early() -> None:
    assert ends({"token_ids": [3]}) == "stop"
    assert ends({"token_ids": [3]}, stop_token_ids=frozenset()) is None
    assert ends({"token_ids": [3]}, min_tokens=1) is None
    assert ends({"token_ids": [3]}, min_tokens=-1) == "stop"


def test_the_engine_s_own_word_counts() -> None:
    assert ends({"token_ids": [9], "finish_reason": "stop"}) == "stop"
    assert ends({"token_ids": [9], "finish_reason": "content_filter"}) == "content_filter"


def test_limits_end_the_round() -> None:
    assert ends({"token_ids": [9]}, max_tokens=1) == "length"
    assert ends({"token_ids": [3]}, max_tokens=1) == "stop"
    assert ends({"token_ids": [9]}, prompt_tokens=99, context_limit=100) == "length"
    assert ends({"token_ids": [9]}, prompt_tokens=98, context_limit=100) is None


def test_the_first_chunk_keeps_tokens_and_logprobs_only() -> None:
    chunk = {"token_ids": [1], "log_probs": [-1.0], "index": 0, "finish_reason": "length", "completion_usage": {}}
    assert first_chunk({**chunk, "ampd": {}, "stop_reason": 1}) == {"token_ids": [1], "log_probs": [-1.0], "index": 0}


@given(st.integers(1, 9999), st.integers(0, 9999), st.none() | st.integers(0, 20_000))
def test_usage_adds_up(prompt: int, completion: int, cached: int | None) -> None:
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"audio_tokens": 0},
    }
    merged = merged_usage(usage, prompt, completion, cached)
    assert merged["total_tokens"] == merged["prompt_tokens"] + merged["completion_tokens"] == prompt + completion
    details = merged["prompt_tokens_details"]
    assert details["audio_tokens"] == 0
    assert details.get("cached_tokens") == (None if cached is None else min(cached, prompt))
    assert usage["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("status", "error_class"),
    [(400, "InvalidRequest"), (429, "RateLimited"), (500, "Internal"), (503, "Unavailable"), (418, "Internal")],
)
def test_an_error_is_an_event_whose_class_has_the_status(status: int, error_class: str) -> None:
    text = 'too many; "retry after 3 s"'
    chunk = error_chunk(status, text)
    assert (chunk["_dynamo_annotated"], chunk["event"], chunk["comment"]) == (True, "error", [text])
    assert (chunk["error"]["class"], chunk["error"]["public"]) == (error_class, {"type": "message", "message": text})
