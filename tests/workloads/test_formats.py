"""Every loader on a small input of our own invention; rewrites of the context must survive."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from workloads.formats import LoadOptions, formats, load_sessions
from workloads.trace import Session

NOTES: list[str] = []


def words(text: str) -> int:
    """A tokenizer for tests: one token a word."""
    return len(text.split())


def load(name: str, path: Path, *, with_text: bool = False) -> list[Session]:
    NOTES.clear()
    return list(load_sessions(name, path, LoadOptions(count_tokens=words, with_text=with_text, note=NOTES.append)))


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shape(session: Session) -> list[tuple[int, int, float, int | None]]:
    return [(r.incr_tokens, r.output_tokens, r.tool_s, r.keep_tokens) for r in session.rounds]


def say(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_toolbench_counts_schemas_calls_and_rewrites(tmp_path: Path) -> None:
    start = [say("system", "you are"), say("user", "do this now")]
    call = say("assistant", None, function_call={"name": "look", "arguments": "up it"})
    result = say("function", "one two three four")
    final = say("assistant", "all done")
    answer = {
        "function": [{"name": "look"}],
        "train_messages": [[*start, call], [*start, call, result, final], [*start, say("user", "again"), final]],
    }
    folder = tmp_path / "answer"
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps({"answer_generation": answer}))
    (folder / "2.json.gz").write_bytes(gzip.compress(json.dumps({"answer_generation": {}}).encode()))
    (session,) = load("toolbench", folder, with_text=True)
    # Prompt: schemas (2 words), system 2, user 3, each + 4, and the answer's header of 3; outputs: words + end.
    assert shape(session) == [
        (2 + 2 + 3 + 12 + 3, 3 + 1, 0.0, None),
        (4 + 4 + 3, 2 + 1, 0.0, None),
        (1 + 4 + 3, 2 + 1, 0.0, 2 + 2 + 3 + 12),
    ]
    assert session.rounds[1].text == "one two three four"
    assert len(NOTES) == 1
    assert "2.json.gz" in NOTES[0]


def test_tau_bench_makes_a_round_of_every_assistant_message(tmp_path: Path) -> None:
    run = {
        "task_id": 3,
        "trial": 1,
        "traj": [
            say("system", "policy text"),
            say("user", "hello there"),
            say("assistant", None, tool_calls=[{"function": {"name": "get", "arguments": "{}"}}]),
            say("tool", "a b c"),
            say("assistant", "bye"),
        ],
    }
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([run]))
    (session,) = load("tau_bench", path)
    assert session.session_id == "3-1"
    assert shape(session) == [(2 + 2 + 8 + 3, 2 + 1, 0.0, None), (3 + 4 + 3, 1 + 1, 0.0, None)]


def _request(prompt: int, out: int, blocks: list[int], t: float, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": prompt, "out": out, "hash_ids": blocks, "api_time": 1.0, **more}


def test_kv_cache_tester_keeps_rewrites_and_sub_agents(tmp_path: Path) -> None:
    trace = {
        "id": "x",
        "block_size": 10,
        "requests": [
            _request(35, 5, [1, 2, 3], 0.0, think_time=0.0),
            _request(60, 5, [1, 2, 3, 4, 5, 6], 4.0, think_time=3.0),  # extends 35 + 5
            _request(62, 5, [1, 2, 3, 4, 5, 6], 9.0),  # longer, but the output (5) is gone
            _request(100, 5, [1, 2, 9, 9, 9, 9, 9, 9, 9, 9], 11.0, think_time=0.5),  # diverges after two blocks
            _request(40, 5, [1, 2, 9, 9], 20.0, think_time=0.5),  # shrinks
            {"t": 2.0, "type": "subagent", "requests": [_request(20, 2, [7, 8], 0.5)]},
        ],
    }
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    session, agent = load("kv-cache-tester", path)
    assert shape(session) == [
        (35, 5, 0.0, None),
        (20, 5, 3.0, None),
        (2, 5, 4.0, 60),
        (80, 5, 0.5, 20),
        (1, 5, 0.5, 39),
    ]
    assert (agent.session_id, agent.arrival_s, shape(agent)) == ("x/agent1", 2.0, [(20, 2, 0.0, None)])


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
    assert shape(first) == [(3, 2, 0.0, None), (2, 1, 3.5, None), (2, 1, 1.0, 2)]
    assert (sub.session_id, sub.arrival_s, shape(sub)) == ("one/agent2", 3.5, [(2, 1, 0.0, None)])
    assert (second.arrival_s, shape(second)) == (60.0, [(500, 60, 0.0, None)])


def _moon(session: str | None, prompt: int, out: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    row = {"input_length": prompt, "output_length": out, "hash_ids": blocks, **more}
    return row if session is None else {"session_id": session, **row}


def test_mooncake_sessions(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "m.jsonl",
        _moon("a", 1000, 50, [1, 2], timestamp=2000),
        _moon(None, 100, 5, [9], timestamp=2500),
        _moon("a", 1600, 50, [1, 3, 4, 5], delay=700),
        _moon("a", 1500, 10, [1, 6, 7], delay=100),
    )
    session, single = load("mooncake", path)
    assert session.arrival_s == 2.0
    assert shape(session) == [(1000, 50, 0.0, None), (550, 50, 0.7, None), (988, 10, 0.1, 512)]
    assert (single.arrival_s, shape(single)) == (2.5, [(100, 5, 0.0, None)])


def test_mooncake_delta_adds_up(tmp_path: Path) -> None:
    rows = (_moon("a", 1000, 50, [], timestamp=0), _moon("a", 30, 5, [], delay=1500))
    (session,) = load("mooncake-delta", jsonl(tmp_path / "m.jsonl", *rows))
    assert shape(session) == [(1000, 50, 0.0, None), (30, 5, 1.5, None)]


def test_agentic_mooncake_adds_delay_and_tool_wait(tmp_path: Path) -> None:
    rows = (
        _moon("a", 600, 10, [1, 2], request_id="r1", timestamp=0, prefix_reset=True),
        _moon("a", 700, 10, [1, 3], request_id="r2", timestamp=900, wait_for=["r1"], delay=100, tool_wait_ms=200),
        _moon("a", 800, 10, [], request_id="r3", timestamp=999, wait_for=["r2"], delay=50, prefix_reset=True),
    )
    (session,) = load("agentic_mooncake", jsonl(tmp_path / "m.jsonl", *rows))
    assert shape(session) == [(600, 10, 0.0, None), (90, 10, pytest.approx(0.3), None), (800, 10, 0.05, 0)]


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


def test_azure_rows_are_single_rounds(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,0,8\n2023-11-16 18:17:05.9799600,110,27\n"
    )
    first, second = load("azure", path)
    assert shape(first) == [(4808, 10, 0.0, None)]
    assert second.arrival_s == 2.0
    assert "1 rows" in NOTES[0]
    path.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(UserError, match=r"a\.csv:1: column GeneratedTokens"):
        load("azure", path)


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


def test_unknown_formats_and_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown trace format 'nope'; known: .*toolbench.*trail"):
        load("nope", tmp_path)
    with pytest.raises(UserError, match="no such file"):
        load("trail", tmp_path / "missing")


@pytest.mark.parametrize("name", sorted(formats()))
def test_garbage_is_one_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    for suffix, content in (
        (".json", "{}\n"),
        (".jsonl", '{"a": 1}\n'),
        (".csv", "a,b\n"),
        (".json", "[3]"),
        (".jsonl", "?"),
    ):
        path = tmp_path / f"garbage{suffix}"
        path.write_text(content)
        message = _refusal(name, path)
        assert message is None or (str(path) in message and "\n" not in message)


def _refusal(name: str, path: Path) -> str | None:
    """Why the loader refused the file; None if it found nothing in it."""
    try:
        loaded = load(name, path)
    except UserError as error:
        return str(error)
    return None if not loaded else f"{path} was read as {loaded}\n"
