"""TraceLab: gaps between rounds and prompts that shrink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError

from .lab import jsonl, load, shape


def _lab(index: int, total: int, prefix: int, out: int, events: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {
        "session_id": "s",
        "round_index": index,
        "input_tokens_total": total,
        "prefix_tokens": prefix,
        "output_tokens": out,
        "timing_events": [{"event_type": kind, "timestamp": f"2026-06-01T00:00:{at}Z"} for kind, at in events],
        **more,
    }


def test_tracelab_gaps_and_shrinking_prompts(tmp_path: Path) -> None:
    rows = (
        _lab(0, 100, 0, 10, [("user_message", "01.000"), ("tool_call", "03.000")]),
        _lab(1, 150, 20, 10, [("tool_result", "05.500"), ("text", "06.000")], tools=[{"tool_wall_latency_ms": 4000}]),
        _lab(2, 90, 64, 10, []),
    )
    (session,) = load("tracelab", jsonl(tmp_path / "l.jsonl", *rows))
    # A small cached prefix is no rewrite as long as the prompt grows; a shorter prompt is one.
    assert shape(session) == [(100, 10, 0.0, None), (40, 10, 2.5, None), (26, 10, 4.0, 64)]


def test_the_copies_of_a_release_are_not_counted_twice(tmp_path: Path) -> None:
    for name in ("derived", "sanitized"):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "round_trace.jsonl", _lab(0, 100, 0, 10, []))
    with pytest.raises(UserError, match=r"holds 2 traces.*derived/round_trace\.jsonl"):
        load("tracelab", tmp_path)
    assert len(load("tracelab", tmp_path / "derived")) == 1
