"""What the clients of the overload read of answers, and what its table says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.graph_processes import memory_limits
from benchmarks.overload import table
from benchmarks.plain_http import answer_of, chat_of

ENGINE_DATA = {"engine_data": {"ampd": {"ttft_s": 1.5}}}
WHOLE = {"choices": [{"message": {"content": "ab"}}], "nvext": ENGINE_DATA}
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": None}}], "nvext": None},
    {"choices": [{"delta": {"content": "a"}}]},
    {"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}], "nvext": ENGINE_DATA},
]


def events(*chunks: Any, end: str = "data: [DONE]\n\n") -> bytes:
    return ("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end).encode()


@pytest.mark.parametrize(
    ("text", "chat"),
    [
        (json.dumps(WHOLE).encode(), WHOLE),
        (events(*CHUNKS), WHOLE),
        (events(*CHUNKS, end=""), None),
        (events(*CHUNKS[:2], {"error": {"message": "lost"}}), None),
        (b"event: error\n" + events({"error": {}}), None),
    ],
)
def test_a_chat_is_read_whole_or_from_its_stream(text: bytes, chat: dict[str, Any] | None) -> None:
    assert chat_of(answer_of(b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n\r\n" + text)) == chat


@pytest.mark.parametrize(("header", "seconds"), [(b"Retry-After: 7\r\n", 7.0), (b"", None)])
def test_the_time_to_come_back_is_that_of_the_header(header: bytes, seconds: float | None) -> None:
    answer = answer_of(b"HTTP/1.1 429 Too Many Requests\r\n" + header + b'\r\n{"message": "retry after 9 s"}')
    assert (answer.status, answer.retry_after_s) == (429, seconds)


def test_the_table_names_other_statuses_and_the_relays_memory() -> None:
    row = {
        "load": 10.0,
        "sessions_per_s": 3.0,
        "goodput_rounds_per_s": 1.4,
        "accepted": 9,
        "ttft_p50_s": 1.0,
        "ttft_p99_s": 2.0,
        "statuses": {200: 9, 429: 5, 503: 2, 0: 1},
        "refused_share": 0.5,
        "refused_with_time": 1.0,
        "most_queued": 3.0,
        "most_published": {"view_bytes": 1000},
        "redis_bytes_per_s": 1.0,
        "metrics_p99_s": 0.1,
        "metrics_longest_s": 0.2,
        "leases_lost": 0.0,
        "rounds_left_over": 0.0,
        "most_bytes": {"frontend": 300 << 20, "relay": 100 << 20},
    }
    lines = table([row]).splitlines()
    assert "| 503: 2, broken stream: 1 |" in lines[2]
    assert f"| frontend | 300 | {memory_limits()['frontend'] >> 20} |" in lines
    assert "| relay | 100 | in that of the frontend |" in lines
