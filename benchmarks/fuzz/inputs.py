"""What users write: traces, settings, names of policies, profiles, URLs."""

from __future__ import annotations

import io
import json
import random
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from ampd.cli.serve.settings import ServeSettings
from ampd.cli.session import EndSettings
from ampd.cli.top import TopSettings
from ampd.errors import UserError
from ampd.perf.model_shape import read_model_shape
from ampd.perf.presets import analytic_model, load_performance_model
from ampd.policies.registry import create_named
from ampd.settings import Settings, parse_settings
from ampd.state.redis_connection import check_url
from ampd.types import Parallelism
from benchmarks.fuzz.mutations import ODD, changed_bytes, changed_json, changed_text
from benchmarks.fuzz.target import Target
from planner.case_settings import PlanSettings
from planner.plan_command import parse_degrees
from planner.simulate_command import SimulateSettings, parse_rates
from planner.simulator.options import parse_groups
from router.settings import CoordinatorSettings, context_length, vocabulary_size
from workers.engines.replies import Replies
from workers.settings import WorkerSettings
from workloads.formats import LoadOptions, load_sessions
from workloads.replay_command import ReplaySettings
from workloads.trace import Session, read_trace
from workloads.trace_command import GenerateSettings

_SESSIONS = [
    {"session_id": "a", "arrival_s": 0.5, "rounds": [
        {"incr_tokens": 100, "output_tokens": 9, "tool_s": 0.0},
        {"incr_tokens": 30, "output_tokens": 2, "tool_s": 1.5, "keep_tokens": 50},
    ]},
    {"session_id": "b", "arrival_s": 2.0, "rounds": [{"incr_tokens": 5, "output_tokens": 1, "tool_s": 0.0}]},
]  # fmt: skip
_MOON = {"session_id": "a", "input_length": 1000, "output_length": 50, "hash_ids": [1, 2], "timestamp": 2000}
_BLOCKS = {"trace_block_size": 64, "input_length": 200, "input_sequence_hashes": [1, 2, 3, 4]}
_ENDED = {"request_id": "r", "input_tokens": 200, "output_tokens": 9, "request_received_ms": 1000,
          "total_time_ms": 500.0, "replay": _BLOCKS}  # fmt: skip
_SPAN = {"span_id": "a", "timestamp": "2025-03-01T10:00:00Z", "duration": "PT1.5S", "child_spans": [],
         "span_attributes": {
    "openinference.span.kind": "LLM", "output.value": "call it", "llm.input_messages.0.message.content": "be good",
}}  # fmt: skip
_TRAJECTORY = [
    {"role": "system", "content": "policy text"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": "{}"}}]},
    {"role": "tool", "content": "a b c"},
    {"role": "assistant", "content": "bye"},
]
_TOOLBENCH = {"answer_generation": {"function": [{"name": "look"}], "train_messages": [_TRAJECTORY]}}
_TRACELAB = {"session_id": "s", "round_index": 0, "input_tokens_total": 100, "prefix_tokens": 0, "output_tokens": 10,
             "timing_events": [{"event_type": "tool_call", "timestamp": "2026-06-01T00:00:03.000Z"}]}  # fmt: skip
_TESTER = {"id": "x", "block_size": 10, "requests": [
    {"t": 0.0, "type": "n", "in": 35, "out": 5, "hash_ids": [1, 2, 3], "api_time": 1.0, "think_time": 0.0},
    {"t": 2.0, "type": "subagent",
     "requests": [{"t": 0.5, "type": "n", "in": 20, "out": 2, "hash_ids": [7], "api_time": 1.0}]},
]}  # fmt: skip
_AT = "2026-06-09T13:42:47.091Z"
_TEXTS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97996,4808,10\n2023-11-16 18:17:05.9,110,2",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,API log\n",
    "vllm": "(APIServer pid=7) INFO 11-28 20:00:01 [logger.py:47] Received request chatcmpl-a: prompt: 'x y', params: "
    "SamplingParams(n=1, stop=[]), prompt_token_ids: [1, 2], lora_request: None.\n"
    "INFO 11-28 20:00:03 [logger.py:80] Generated response chatcmpl-a: output: 'z', output_token_ids: [8, 9], x\n",
    "sglang": "[2026-11-28T20:00:02] Finish: obj=GenerateReqInput(rid='x', text='x y', input_ids=[1, 2]), "
    "out={'text': 'z', 'meta_info': {'prompt_tokens': 9, 'completion_tokens': 2, 'e2e_latency': 2.0}}\n",
}

_LINES: dict[str, list[Any]] = {
    "mooncake": [_MOON, {**_MOON, "delay": 700, "hash_ids": [1, 3, 4]}],
    "mooncake-delta": [{**_MOON, "hash_ids": []}, {**_MOON, "hash_ids": [], "delay": 1500}],
    "agentic-mooncake": [{**_MOON, "request_id": "r1", "prefix_reset": True},
                         {**_MOON, "request_id": "r2", "wait_for": ["r1"], "delay": 100, "tool_wait_ms": 200}],
    "dynamo": [{"event": {"event_type": "request_end", "agent_context": {"session_id": "s"}, "request": _ENDED}}] * 2,
    "tracelab": [_TRACELAB, {**_TRACELAB, "round_index": 1, "input_tokens_total": 150, "prefix_tokens": 64}],
    "claude-code": [{"type": "user", "sessionId": "s", "uuid": "u", "parentUuid": None, "timestamp": _AT,
                     "message": {"role": "user", "content": [{"type": "text", "text": "x"}]}},
                    {"type": "assistant", "sessionId": "s", "uuid": "v", "parentUuid": "u", "timestamp": _AT,
                     "message": {"id": "m", "content": [], "usage": {"input_tokens": 5, "output_tokens": 2}}}],
    "codex": [{"timestamp": _AT, "type": "session_meta", "payload": {"id": "t"}},
              {"timestamp": _AT, "type": "response_item", "payload": {"type": "message", "role": "assistant"}},
              {"timestamp": _AT, "type": "event_msg", "payload": {"type": "token_count", "info": {
                  "total_token_usage": {"input_tokens": 9}, "last_token_usage": {"input_tokens": 9}}}}],
    "litellm": [{"call_type": "acompletion", "startTime": _AT, "endTime": _AT, "prompt_tokens": 9,
                 "completion_tokens": 2, "messages": _TRAJECTORY, "response": {"choices": [{"message": {}}]}}],
    "langfuse": [{"type": "GENERATION", "traceId": "t", "startTime": _AT, "usageDetails": {"input": 9, "output": 2},
                  "input": _TRAJECTORY, "output": {"content": "x"}}],
    "aiperf": [{"metadata": {"x_correlation_id": "c", "request_start_ns": 1_764_300_000_000_000_000},
                "metrics": {"input_sequence_length": {"value": 9}, "output_sequence_length": {"value": 2}}}],
    "bailian": [{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 9, "output_length": 2,
                 "hash_ids": [1]}],
    "openai-messages": [{"request": {"messages": _TRAJECTORY}, "response": {"choices": [{"message": {}}]}}],
}  # fmt: skip
_WHOLE: dict[str, Any] = {
    "tau-bench": [{"task_id": 3, "trial": 1, "traj": _TRAJECTORY}],
    "toolbench": _TOOLBENCH,
    "kv-cache-tester": _TESTER,
    "trail": {"trace_id": "one", "spans": [_SPAN]},
    "otel": {"resourceSpans": [{"scopeSpans": [{"spans": [
        {"traceId": "a", "spanId": "b", "startTimeUnixNano": "1764300000000000000",
         "attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9"}},
                        {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}]}]}]}]},
    "swe-agent": {"trajectory": [{"response": "x", "execution_time": 2.5}], "history": _TRAJECTORY},
    "openhands": [{"source": "user", "action": "message", "timestamp": "2026-03-01T10:00:00"},
                  {"source": "agent", "action": "run", "timestamp": "2026-03-01T10:00:02",
                   "tool_call_metadata": {"model_response": {"id": "r", "usage": {"prompt_tokens": 9}}}}],
    "sharegpt": [{"id": "a", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}],
}  # fmt: skip

_ARGUMENTS: tuple[tuple[type[Settings], str], ...] = (
    (CoordinatorSettings, "--model /m --ttft 2 --itl 0.1 --routing predictive(overlap=1) --retries 3 --lease-s=5"),
    (
        WorkerSettings,
        "--role decode --engine modelled --model /m --tp 2 --ordering on-time --slicing slack",
    ),
    (
        ServeSettings,
        "--prefill 1 --decode 2 --coordinators 2 --port 0 --host 127.0.0.1 --worker-args '--tp 1' --ttft 1.0",
    ),
    (
        SimulateSettings,
        "tau-bench-airline --model qwen3-32b --gpu h20 --prefill 2xTP2 --decode 2xTP2 --rate 3,4 --seed 1",
    ),
    (
        PlanSettings,
        "tau-bench-airline --model qwen3-32b --gpu h20 --gpus 8 --rate 2 --budget-s 60 --kv-store-gib-per-gpu 40 "
        "--kv-capacity-tokens 100000 --degrees 1,2,4 --seed 1",
    ),
    (GenerateSettings, "toolbench --sessions 5 --seed 3 --output /tmp/t.jsonl --rate 2"),
    (TopSettings, "--interval-s 1 --once --perf tiny-cpu"),
    (EndSettings, "one --tenant acme --coordinator-url http://127.0.0.1:9090"),
    (
        ReplaySettings,
        "tau-bench-airline --url http://127.0.0.1:8000 --rate 2 --limit 150 --ttft 0.5 --itl 0.05",
    ),
)
_POLICIES = (
    ("routing", "ampd(alpha=0.7,beta=0.5)"), ("ordering", "ampd(window=8)"), ("slicing", "slack"),
    ("pools", "predictive"), ("binding", "least-kv"), ("routing", "threshold(tokens=512)"),
)  # fmt: skip
_URLS = (
    "redis://ampd:pass%2Fword@10.0.0.1:6379/0", "rediss://h:1/2?ssl_ca_certs=/ca", "unix:///run/redis.sock?db=1",
    "redis+sentinel://u:p@a:26379,b:26379/service/1", "redis://[::1]:6379/0",
)  # fmt: skip
_REPLIES = [
    {"session": "a", "content": "look", "tool_calls": [{"name": "get", "arguments": {"city": "Rome"}}]},
    {"session": "a", "content": "done", "reasoning_content": "first this"},
    {"text": "plain"},
    {"tool_calls": [{"function": {"name": "get", "arguments": '{"deep": [[[1]]]}'}}]},
]
_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 500, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
_PROFILE = Path(__file__).parents[2] / "ampd" / "perf" / "profiles" / "tiny-cpu.json"


def targets(folder: Path) -> Iterator[Target]:
    """The parsers of what users write. `folder`: for files."""
    yield Target("trace", lambda rng: _lines(rng, _SESSIONS), lambda data: _read(folder, data), (UserError,))
    for name, rows in _LINES.items():
        yield _format(folder, name, ".jsonl", lambda rng, rows=rows: _lines(rng, rows))
    for name, value in _WHOLE.items():
        yield _format(folder, name, ".json", lambda rng, value=value: _encoded(rng, changed_json(rng, value)))
    for name, text in _TEXTS.items():
        yield _format(folder, name, ".log", lambda rng, text=text: _encoded(rng, changed_text(rng, text)))
    yield Target("settings", _arguments, _parse_settings, (UserError,))
    yield Target("policy", _policy, lambda given: create_named(*given), (UserError,))
    yield Target("state-url", lambda rng: changed_text(rng, rng.choice(_URLS)), check_url, (UserError,))
    yield Target("replies", lambda rng: _lines(rng, _REPLIES), lambda data: _read_replies(folder, data), (UserError,))
    config = lambda rng: _encoded(rng, changed_json(rng, _CONFIG))  # noqa: E731
    yield Target("model config", config, lambda data: _read_config(folder, data), (UserError,))
    profile = _PROFILE.read_text("utf-8")
    yield Target("profile", lambda rng: _profile(rng, profile), lambda data: _load(folder, data), (UserError,))


def _format(folder: Path, name: str, suffix: str, make: Any) -> Target:
    return Target(f"format {name}", make, lambda data: _convert(folder, name, suffix, data), (UserError,))


def _encoded(rng: random.Random, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return changed_bytes(rng, data) if rng.random() < 0.1 else data


def _lines(rng: random.Random, rows: list[Any]) -> bytes:
    lines = [json.dumps(row) for row in rows]
    wrong = rng.randrange(len(rows))
    lines[wrong] = changed_json(rng, rows[wrong])
    return _encoded(rng, "\n".join(lines) + "\n")


def _read(folder: Path, data: bytes) -> None:
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    _check(list(read_trace(path)))


def _convert(folder: Path, name: str, suffix: str, data: bytes) -> None:
    path = folder / f"source{suffix}"
    path.write_bytes(data)
    _check(
        list(load_sessions(name, path, LoadOptions(count_tokens=lambda text: len(text.split()), note=lambda _: None)))
    )


def _check(sessions: list[Session]) -> None:
    for session in sessions:
        assert Session.model_validate(session.model_dump()) == session
        assert all(kept >= 0 and new > 0 for kept, new in session.prompts_tokens())


def _arguments(rng: random.Random) -> tuple[type[Settings], list[str]]:
    kind, line = rng.choice(_ARGUMENTS)
    words = _words(changed_text(rng, line))
    if rng.random() < 0.7:
        words = shlex.split(line)
        at = rng.randrange(len(words))
        words[at] = rng.choice((changed_text(rng, words[at]), str(rng.choice(ODD))[:400]))
    return kind, [word for word in words if not "--help".startswith(word) and not word.startswith("-h")]


def _words(line: str) -> list[str]:
    """The words of a command line; split at spaces if its quotes do not match."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _parse_settings(given: tuple[type[Settings], list[str]]) -> None:
    kind, words = given
    with redirect_stderr(io.StringIO()):
        settings = parse_settings(kind, words, "ampd")
    if isinstance(settings, SimulateSettings):
        parse_rates(settings.rate)
        parse_groups(settings.prefill or "", "--prefill")
    if isinstance(settings, PlanSettings):
        parse_degrees(settings.degrees)
        assert settings.gpus < 1e9
        assert settings.kv_store_gib_per_gpu is None or int(settings.kv_store_gib_per_gpu * 2**30) >= 0


def _policy(rng: random.Random) -> tuple[str, str]:
    kind, text = rng.choice(_POLICIES)
    return kind, changed_text(rng, text)


def _read_replies(folder: Path, data: bytes) -> None:
    path = folder / "replies.jsonl"
    path.write_bytes(data)
    for reply in Replies.read(path).all:
        assert reply.text is None or not reply.tool_calls


def _read_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    shape = read_model_shape(folder / "config.json")
    assert shape.layers
    analytic_model(str(folder / "config.json"), "h20")
    vocabulary_size(folder)
    context_length(folder, None)


def _profile(rng: random.Random, text: str) -> bytes:
    return _encoded(rng, changed_json(rng, json.loads(text)))


def _load(folder: Path, data: bytes) -> None:
    path = folder / "profile.json"
    path.write_bytes(data)
    model = load_performance_model(path)
    for hist_tokens, incr_tokens in ((0, 100), (10**6, 10**6)):
        seconds = model.prefill_s(hist_tokens, incr_tokens, Parallelism(1))
        assert 0 <= seconds < float("inf")
