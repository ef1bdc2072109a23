"""Tables and logs of requests, in the shape that their sources have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workloads.formats import detect

from .lab import NOTES, jsonl, load, say, shape


def test_burstgpt(tmp_path: Path) -> None:
    """Files 1 and 2 have six columns, file 3 also sessions and how long a request took."""
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,API log\n118,GPT-4,417,0,417,API log\n"
    )
    assert detect(path)[0] == "burstgpt"
    assert [(each.arrival_s, shape(each)[0][:2]) for each in load("burstgpt", path)] == [
        (0, (472, 18)),
        (40, (1087, 230)),
    ]
    assert "1 requests without tokens" in NOTES[0]
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,17-a,43,GPT-4,906,446,1352,API log\n19440192.0,17-a,8,GPT-4,1400,20,1420,API log\n"
    )
    (session,) = load("burstgpt", path)
    assert (session.session_id, shape(session)) == ("17-a", [(906, 446, 0.0, None), (48, 20, 39.0, None)])


def _chat(chat: int, parent: int, at: float, prompt: int, hashes: list[int]) -> dict[str, Any]:
    chain = {"chat_id": chat, "parent_chat_id": parent, "type": "text", "turn": 1}
    return {**chain, "timestamp": at, "input_length": prompt, "output_length": 10, "hash_ids": hashes}


def test_bailian(tmp_path: Path) -> None:
    """Blocks of 16 tokens, seconds; two chats with the same parent are branches."""
    rows = [
        _chat(1, -1, 1.5, 40, [1, 2, 3]),
        _chat(2, 1, 4.0, 70, [1, 2, 4, 5, 6]),
        _chat(3, 1, 5.0, 60, [1, 2, 8, 9]),
        _chat(4, 2, 9.0, 100, [1, 2, 4, 5, 10, 11, 12]),
    ]
    path = jsonl(tmp_path / "qwen.jsonl", *rows)
    assert detect(path)[0] == "bailian"
    chain, branch = load("bailian", path)
    assert shape(chain) == [(40, 10, 0.0, None), (20, 10, 2.5, None), (20, 10, 5.0, None)]
    assert (branch.arrival_s, shape(branch)) == (3.5, [(60, 10, 0.0, None)])
    assert chain.shared_prefix == branch.shared_prefix
    assert chain.shared_prefix is not None
    assert chain.shared_prefix.tokens == 32


def _record(turn: int, start_s: float, took_s: float, prompt: int, out: int, **more: Any) -> dict[str, Any]:
    start_ns = 1_764_300_000_000_000_000 + int(start_s * 1e9)
    names = {
        "session_num": 0,
        "x_request_id": f"r{turn}",
        "x_correlation_id": "c",
        "conversation_id": "s0",
        "turn_index": turn,
    }
    times = {
        "request_start_ns": start_ns,
        "request_end_ns": start_ns + int(took_s * 1e9),
        "benchmark_phase": "profiling",
    }
    counts = {"input_sequence_length": prompt, "output_sequence_length": out}
    metrics = {key: {"value": value, "unit": "tokens"} for key, value in counts.items()}
    return {"metadata": {**names, **times, **more}, "metrics": metrics, "error": None}


def test_aiperf(tmp_path: Path) -> None:
    """`profile_export.jsonl`: metadata and metrics of a request; a failed one has no metrics."""
    failed = {**_record(2, 9, 1, 0, 0), "metrics": {}, "error": {"code": 499}}
    warm_up = _record(0, -9, 1, 5, 5, x_correlation_id="w", benchmark_phase="warmup")
    rows = [warm_up, _record(1, 4, 1, 1200, 30), _record(0, 0, 2, 1000, 50), failed]
    path = jsonl(tmp_path / "profile_export.jsonl", *rows)
    assert detect(path)[0] == "aiperf"
    (session,) = load("aiperf", path)
    assert (session.session_id, shape(session)) == ("c", [(1000, 50, 0.0, None), (150, 30, 2.0, None)])
    assert len(NOTES) == 2


USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def _vllm(second: int, text: str) -> str:
    return f"(APIServer pid=7) INFO 11-28 20:00:{second:02} [logger.py:47] {text}\n"


def _received(second: int, name: str, prompt: str, ids: str) -> str:
    params = f"params: SamplingParams(n=1, stop=[]), prompt_token_ids: {ids}, lora_request: None."
    return _vllm(second, f"Received request chatcmpl-{name}: prompt: {prompt!r}, {params}")


def _generated(second: int, name: str, output: str, ids: list[int]) -> str:
    rest = f"output: {output!r}, output_token_ids: {ids}, finish_reason: stop"
    return _vllm(second, f"Generated response chatcmpl-{name}: {rest}")


def test_vllm(tmp_path: Path) -> None:
    """`--enable-log-requests --enable-log-outputs`; requests are chained by the prompts that a template wrote."""
    first = USER.format("one two three")
    second = first + "four<|im_end|>\n" + USER.format("five")
    path = tmp_path / "server.log"
    path.write_text(
        _vllm(0, "vLLM API server version 0.11")
        + _received(1, "a", first, "[1, 2, 3, 4]")
        + _generated(2, "a (streaming delta)", "fo", [8])
        + _generated(3, "a (streaming complete)", "four", [8, 9])
        + _received(7, "b", second, "None")
        + _generated(8, "b", "six", [5, 6, 7])
    )
    assert detect(path)[0] == "vllm"
    (session,) = load("vllm", path)
    assert [item[1:3] for item in shape(session)] == [(2, 0.0), (3, 4.0)]
    assert shape(session)[0][0] == 4


def test_vllm_without_prompts_says_how_to_log_them(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(_vllm(1, "Received request cmpl-a: params: SamplingParams(n=1), lora_request: None."))
    assert load("vllm", path) == []
    assert "VLLM_LOGGING_LEVEL=DEBUG" in NOTES[0]


def _meta(prompt: int, out: int, took_s: float) -> dict[str, Any]:
    return {"id": "x", "prompt_tokens": prompt, "completion_tokens": out, "cached_tokens": 1, "e2e_latency": took_s}


def _finished(at: str, words: str, answer: str, meta: dict[str, Any]) -> dict[str, Any]:
    out = {"text": answer, "meta_info": meta}
    return {"timestamp": at, "event": "request.finished", "rid": "x", "obj": {"text": words}, "out": out}


def _line(record: dict[str, Any]) -> str:
    obj = f"GenerateReqInput(rid='x', text={record['obj']['text']!r}, input_ids=[1, 2])"
    return f"[{record['timestamp'][:19]}] Finish: obj={obj}, out={record['out']!r}\n"


@pytest.mark.parametrize("form", ["json", "text"])
def test_sglang(tmp_path: Path, form: str) -> None:
    """`--log-requests`, with `--log-requests-format json` and without, between other lines of the server."""
    first = USER.format("it's one")
    second = first + "two<|im_end|>\n" + USER.format("three")
    records = [
        _finished("2026-11-28T20:00:02.000000", first, "two", _meta(1000, 50, 2.0)),
        _finished("2026-11-28T20:00:05.000000", second, "four", _meta(1200, 30, 1.0)),
    ]
    path = tmp_path / "server.log"
    lines = [json.dumps(record) + "\n" if form == "json" else _line(record) for record in records]
    path.write_text("[2026-11-28 20:00:00 TP0] server_args=ServerArgs(model_path='x')\n" + "".join(lines))
    assert detect(path)[0] == "sglang"
    (session,) = load("sglang", path)
    assert shape(session) == [(1000, 50, 0.0, None), (150, 30, 2.0, None)]
    if form == "json":
        assert [shape(each) for each in load("sglang", jsonl(path, *records))] == [shape(session)]


def test_sharegpt(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
    rows = [{"id": "a_0", "conversations": [*turns, *turns]}, {"id": "a_1", "conversations": turns[:1]}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(rows))
    assert detect(path)[0] == "sharegpt"
    (session,) = load("sharegpt", path)
    assert (session.session_id, shape(session)) == ("a_0", [(2 + 4 + 3, 2, 0.0, None), (2 + 4 + 3, 2, 0.0, None)])
    assert f"1 left out, no answer of a model (the first: {path}:1 item 2)" in NOTES[-1]
    chat = [
        say("user", "one two", timestamp="2026-01-01T00:00:00"),
        say("assistant", "x", timestamp="2026-01-01T00:00:02"),
    ]
    later = [
        say("user", "three", timestamp="2026-01-01T00:00:07"),
        say("assistant", "y", timestamp="2026-01-01T00:00:09"),
    ]
    path = jsonl(tmp_path / "wild.jsonl", {"conversation_hash": "h", "conversation": [*chat, *later]})
    assert [shape(each)[1][2] for each in load("sharegpt", path)] == [5.0]


def test_logs_of_anthropics_messages_and_of_responses(tmp_path: Path) -> None:
    ask = {"system": "be good", "messages": [say("user", "hi")], "metadata": {"user_id": "u"}}
    counts = {"input_tokens": 4, "cache_read_input_tokens": 96, "cache_creation_input_tokens": 0, "output_tokens": 9}
    row = {"request": ask, "response": {"content": [{"type": "text", "text": "yes"}], "usage": counts}}
    (session,) = load("openai-messages", jsonl(tmp_path / "m.jsonl", row))
    assert shape(session) == [(100, 9, 0.0, None)]
    assert session.shared_prefix is not None

    def answered(name: str, words: str, before: str | None = None) -> dict[str, Any]:
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}]
        return {"request": {"input": words, "previous_response_id": before}, "response": {"id": name, "output": output}}

    path = jsonl(tmp_path / "r.jsonl", answered("r1", "one two"), answered("r2", "three", "r1"))
    (session,) = load("openai-messages", path)
    assert shape(session) == [(2 + 4 + 3, 2, 0.0, None), (1 + 4 + 3, 2, 0.0, None)]
