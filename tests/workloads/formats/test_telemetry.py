"""Spans and exports of observability tools, in the shape that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads.formats import detect

from .lab import NOTES, jsonl, load, say, shape

START_NS = 1_764_300_000_000_000_000


def _attributes(prompt: int, out: int, **more: Any) -> dict[str, Any]:
    counts = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": out}
    return {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "c1", **counts, **more}


def _otlp(name: str, at_s: float, took_s: float, attributes: dict[str, Any], parent: str = "") -> dict[str, Any]:
    values = [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in attributes.items()
    ]
    start_ns = START_NS + int(at_s * 1e9)
    times = {"startTimeUnixNano": str(start_ns), "endTimeUnixNano": str(start_ns + int(took_s * 1e9))}
    return {"traceId": "aa", "spanId": name, "parentSpanId": parent, "name": "chat m", "attributes": values, **times}


def _flat(span: dict[str, Any]) -> dict[str, Any]:
    plain = {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}
    times = {"start_time": int(span["startTimeUnixNano"]) // 1000, "end_time": int(span["endTimeUnixNano"]) // 1000}
    return {"trace_id": "aa", "span_id": span["spanId"], "parent_span_id": None, "attributes": plain, **times}


def _console(span: dict[str, Any]) -> dict[str, Any]:
    flat = _flat(span)
    context = {"trace_id": "0xaa", "span_id": flat.pop("span_id"), "trace_state": "[]"}
    return {"name": "chat", "context": context, "kind": "SpanKind.CLIENT", **flat}


def _jaeger(span: dict[str, Any]) -> dict[str, Any]:
    flat = _flat(span)
    tags = [{"key": key, "type": "string", "value": value} for key, value in flat["attributes"].items()]
    took = flat["end_time"] - flat["start_time"]
    return {"traceID": "aa", "spanID": flat["span_id"], "startTime": flat["start_time"], "duration": took, "tags": tags}


SPANS = [_otlp("b2", 4, 1, _attributes(1200, 30)), _otlp("b1", 0, 2, _attributes(1000, 50))]
ROUNDS = [(1000, 50, 0.0, None), (150, 30, 2.0, None)]


@pytest.mark.parametrize(
    "content",
    [
        {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": SPANS}]}]},
        {"trace_id": "aa", "spans": [_flat(span) for span in SPANS]},
        [_flat(span) for span in SPANS],
        [_console(span) for span in SPANS],
        {"data": [{"traceID": "aa", "spans": [_jaeger(span) for span in SPANS]}]},
    ],
    ids=["OTLP", "flat", "an array of spans", "the console exporter of the SDK", "Jaeger"],
)
def test_spans_of_all_exporters(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "spans.json"
    path.write_text(json.dumps(content, indent=1))
    assert detect(path)[0] == "otel"
    (session,) = load("otel", path)
    assert (session.session_id, shape(session)) == ("c1", ROUNDS)


def test_spans_around_calls_count_once_and_agents_are_sessions(tmp_path: Path) -> None:
    """A framework writes the sum of an agent's calls in its own span, and a client a second span of the same call."""
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "root", "gen_ai.usage.input_tokens": 9999}
    spans = [
        _otlp("root", 0, 9, agent),
        _otlp("outer", 0, 2, _attributes(1000, 50), "root"),
        _otlp("inner", 0, 2, _attributes(1000, 50), "outer"),
        _otlp("tool", 3, 4, {"gen_ai.operation.name": "execute_tool"}, "root"),
        _otlp("sub", 3, 4, {**agent, "gen_ai.agent.name": "helper"}, "tool"),
        _otlp("subcall", 4, 1, _attributes(300, 5), "sub"),
        _otlp("again", 8, 1, _attributes(1200, 30), "root"),
        {**_otlp("root2", 60, 9, agent), "traceId": "bb"},
        {**_otlp("next", 61, 1, _attributes(1300, 7), "root2"), "traceId": "bb"},
        _otlp("embedding", 62, 1, {"gen_ai.operation.name": "embeddings", "gen_ai.usage.input_tokens": 7}),
    ]
    path = jsonl(
        tmp_path / "spans.jsonl", *({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]} for span in spans)
    )
    root, helper = load("otel", path)
    assert shape(root) == [(1000, 50, 0.0, None), (150, 30, 6.0, None), (70, 7, 52.0, None)]
    assert (helper.session_id, shape(helper)) == ("c1/agent2", [(300, 5, 0.0, None)])


def test_messages_of_spans_are_counted_if_there_is_no_usage(tmp_path: Path) -> None:
    prompt = [{"role": "user", "parts": [{"type": "text", "content": "one two three"}]}]
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": "four"}], "finish_reason": "stop"}]
    attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(prompt)}
    attributes |= {"gen_ai.output.messages": json.dumps(answer)}
    traceloop = {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "one two three"}
    traceloop |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "four"}
    phoenix = {
        "openinference": {"span": {"kind": "LLM"}},
        "llm": {"input_messages": [{"message": say("user", "one two three")}]},
    }
    phoenix |= {"output": {"value": "four"}}
    for found in (attributes, traceloop, phoenix):
        (session,) = load("otel", jsonl(tmp_path / "s.jsonl", {"attributes": found, "start_time": 0}))
        assert shape(session) == [(3 + 4 + 3, 1 + 1, 0.0, None)]


def test_a_cache_that_is_counted_apart_is_a_part_of_the_prompt(tmp_path: Path) -> None:
    apart = {"gen_ai.usage.cache_read.input_tokens": 900, "gen_ai.usage.cache_creation.input_tokens": 96}
    (session,) = load("otel", jsonl(tmp_path / "s.jsonl", {"attributes": _attributes(4, 5, **apart), "start_time": 0}))
    assert shape(session) == [(1000, 5, 0.0, None)]


def _generation(at: int, trace: str, **more: Any) -> dict[str, Any]:
    times = {"startTime": f"2026-05-29T13:46:{at:02}.963Z", "endTime": f"2026-05-29T13:46:{at + 1:02}.963Z"}
    return {"id": f"g{at}", "traceId": trace, "type": "GENERATION", **times, **more}


def test_langfuse(tmp_path: Path) -> None:
    """An API answer of observations, a downloaded trace, and rows of the blob storage export."""
    details = [
        {"input": 1000, "output": 50, "total": 1050},
        {"input": 200, "input_cached_tokens": 1000, "output": 30, "total": 1230},
    ]
    found = [_generation(4, "t2", usageDetails=details[1]), _generation(0, "t1", usageDetails=details[0])]
    other = {"id": "s", "traceId": "t1", "type": "SPAN", "startTime": "2026-05-29T13:46:00.000Z"}
    by_session = [{**item, "sessionId": "chat-1"} for item in found]
    path = tmp_path / "l.json"
    path.write_text(json.dumps({"data": [*by_session, other], "meta": {"page": 1}}))
    assert detect(path)[0] == "langfuse"
    (session,) = load("langfuse", path)
    assert (session.session_id, shape(session)) == ("chat-1", [(1000, 50, 0.0, None), (150, 30, 3.0, None)])
    traces = [
        {"id": item["traceId"], "sessionId": "chat-1", "name": "turn", "observations": [item, other]} for item in found
    ]
    path.write_text(json.dumps(traces))
    assert detect(path)[0] == "langfuse"
    assert [shape(each) for each in load("langfuse", path)] == [shape(session)]
    row: dict[str, Any] = {
        "id": "g",
        "trace_id": "t1",
        "type": "GENERATION",
        "start_time": "2024-05-29 13:46:19.963000",
    }
    row |= {"usage_details": json.dumps(details[0]), "end_time": None}
    assert [shape(each) for each in load("langfuse", jsonl(tmp_path / "b.jsonl", row))] == [[(1000, 50, 0.0, None)]]
    pairs = {**row, "usage_details": [["input", 1000], ["output", 50]]}
    assert [shape(each) for each in load("langfuse", jsonl(tmp_path / "p.jsonl", pairs))] == [[(1000, 50, 0.0, None)]]
    table = {**row, "usage_details": None, "inputUsage": 1000, "outputUsage": 50}
    assert [shape(each) for each in load("langfuse", jsonl(tmp_path / "u.jsonl", table))] == [[(1000, 50, 0.0, None)]]
    words = {"input": [say("user", "one two")], "output": say("assistant", "three"), "usage": {"input": 0, "output": 0}}
    assert [shape(each) for each in load("langfuse", jsonl(tmp_path / "w.jsonl", _generation(0, "t", **words)))] == [
        [(2 + 4 + 3, 1 + 1, 0.0, None)]
    ]


def _spent(at: int, prompt: int, out: int, **more: Any) -> dict[str, Any]:
    times = {"startTime": f"2026-05-29 13:46:{at:02}.5+00:00", "endTime": f"2026-05-29 13:46:{at + 1:02}.500000+00:00"}
    counts = {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}
    return {"request_id": f"r{at}", "call_type": "acompletion", **times, **counts, "session_id": "s", **more}


def test_litellm(tmp_path: Path) -> None:
    """Rows of the table of spend logs (newest first, as its page shows them), and a callback's payload."""
    rows = [
        _spent(9, 5000, 5, cache_hit="True"),
        _spent(8, 0, 0, status="failure"),
        _spent(4, 1200, 30, cache_hit="False", messages="{}", response="{}", metadata='{"user_api_key": "x"}'),
        _spent(0, 1000, 50),
    ]
    path = tmp_path / "spend.json"
    path.write_text(json.dumps(rows))
    assert detect(path)[0] == "litellm"
    (session,) = load("litellm", path)
    assert (session.session_id, shape(session)) == ("s", [(1000, 50, 0.0, None), (150, 30, 3.0, None)])
    assert [note.partition(": ")[2].split()[0] for note in NOTES] == ["1", "1"]
    payload = {
        "id": "x",
        "trace_id": "t",
        "call_type": "completion",
        "startTime": 1_764_300_000.25,
        "endTime": 1_764_300_001.5,
    }
    payload |= {"prompt_tokens": 70, "completion_tokens": 7, "messages": [say("user", "x")], "status": "success"}
    assert [shape(each) for each in load("litellm", jsonl(tmp_path / "p.jsonl", payload))] == [[(70, 7, 0.0, None)]]
