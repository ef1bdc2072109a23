"""Dynamo's request traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .lab import jsonl, load, shape


def _ended(session: str, at_ms: int, took_ms: float, prompt: int, out: int, hashes: list[int]) -> dict[str, Any]:
    request = {
        "request_id": f"r{at_ms}",
        "input_tokens": prompt,
        "output_tokens": out,
        "request_received_ms": at_ms,
        "total_time_ms": took_ms,
        "replay": {"trace_block_size": 64, "input_length": prompt, "input_sequence_hashes": hashes},
    }
    context = {"session_id": session}
    return {"timestamp": 1, "event": {"event_type": "request_end", "agent_context": context, "request": request}}


def test_dynamo_request_traces(tmp_path: Path) -> None:
    rows = (
        {"event": {"event_type": "tool_end"}},
        _ended("s", 3000, 500.0, 230, 5, [1, 2, 3, 5]),
        _ended("s", 1000, 500.0, 200, 10, [1, 2, 3, 4]),
        _ended("s", 4000, 500.0, 300, 10, [1, 9, 9, 9, 9]),
    )
    (session,) = load("dynamo", jsonl(tmp_path / "d.jsonl", *rows))
    assert shape(session) == [(200, 10, 0.0, None), (20, 5, 1.5, None), (236, 10, 0.5, 64)]
