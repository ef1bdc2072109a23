"""TRAIL: agents within agents, and the gaps between their calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .lab import load, shape


def _llm(span_id: str, start: str, seconds: float, messages: list[str], output: str, **more: Any) -> dict[str, Any]:
    attributes = {"openinference.span.kind": "LLM", "output.value": output, **more}
    attributes |= {f"llm.input_messages.{n}.message.content": text for n, text in enumerate(messages)}
    return {
        "span_id": span_id,
        "timestamp": start,
        "duration": f"PT{seconds}S",
        "span_attributes": attributes,
        "child_spans": [],
    }


def _agent(span_id: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {
        "span_id": span_id,
        "timestamp": "2025-03-01T10:00:00Z",
        "duration": "PT9S",
        "span_attributes": {"openinference.span.kind": "AGENT"},
        "child_spans": list(children),
    }


def test_trail_separates_agents_and_measures_gaps(tmp_path: Path) -> None:
    tool = {
        "span_id": "t",
        "timestamp": "2025-03-01T10:00:02Z",
        "duration": "PT3S",
        "span_attributes": {"openinference.span.kind": "TOOL"},
        "child_spans": [_agent("sub", _llm("c", "2025-03-01T10:00:03.500000Z", 1, ["sub task"], "x"))],
    }
    main = _agent(
        "main",
        _llm("a", "2025-03-01T10:00:00Z", 1.5, ["be good", "task"], "call it"),
        tool,
        _llm("b", "2025-03-01T10:00:05Z", 1, ["be good", "task", "call it", "r1 r2"], "done"),
        _llm("d", "2025-03-01T10:00:07Z", 1, ["be good", "summary now"], "end"),
    )
    recorded = {"llm.token_count.prompt": 500, "llm.token_count.completion": 60}
    other = {"trace_id": "two", "spans": [_llm("e", "2025-03-01T10:01:00Z", 1, ["hello"], "hi", **recorded)]}
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"trace_id": "one", "spans": [main]}, other]))
    first, sub, second = load("trail", path)
    assert shape(first) == [(14, 3, 0.0, None), (9, 2, 3.5, None), (9, 2, 1.0, 6)]
    assert (sub.session_id, sub.arrival_s, shape(sub)) == ("one/agent2", 3.5, [(9, 2, 0.0, None)])
    assert (second.arrival_s, shape(second)) == (60.0, [(500, 60, 0.0, None)])
