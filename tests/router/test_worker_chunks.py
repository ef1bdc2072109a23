"""Chunks that no engine makes."""

from typing import Any

import pytest

from router.round_errors import WorkerLostError
from router.worker_chunks import check_chunk

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 1,
    "prompt_tokens_details": {"cached_tokens": 0},
    "total_tokens": None,
}


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"token_ids": [], "index": 1},
        {"token_ids": [5, 2**32 - 1], "index": 0, "log_probs": [-0.5], "top_logprobs": None},
        {"token_ids": None, "finish_reason": "stop", "stop_reason": 7, "completion_usage": USAGE, "ampd": {}},
    ],
)
def test_chunks_of_engines_pass(chunk: dict[str, Any]) -> None:
    check_chunk("d1", chunk, 2)


@pytest.mark.parametrize(
    "chunk",
    [
        None,
        [],
        {"token_ids": [2**32]},
        {"token_ids": [-1]},
        {"token_ids": ["5"]},
        {"token_ids": [True]},
        {"token_ids": "ab"},
        {"index": 2},
        {"index": -1},
        {"token_ids": [], "index": 0, "finish_reason": 5},
        {"token_ids": [], "index": 0, "stop_reason": [5]},
        {"token_ids": [], "index": 0, "log_probs": "x"},
        {"token_ids": [], "index": 0, "engine_data": 1},
        {"token_ids": [], "index": 0, "completion_usage": {"prompt_tokens": -1}},
        {"token_ids": [], "index": 0, "completion_usage": {"prompt_tokens_details": {"cached_tokens": b"x"}}},
    ],
)
def test_a_malformed_chunk_is_a_lost_worker(chunk: Any) -> None:
    with pytest.raises(WorkerLostError, match="malformed") as lost:
        check_chunk("d1", chunk, 2)
    assert not lost.value.has_died
