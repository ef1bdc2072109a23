"""Session files of agents, in the shape that their programs write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workloads.formats import detect
from workloads.trace import SharedPrefix

from .lab import NOTES, jsonl, load, say, shape


def _claude(kind: str, second: float, content: Any, session: str = "s1", **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content, **more.pop("message", {})}
    at = f"2026-06-09T13:42:{second:06.3f}Z"
    shared = {"isSidechain": False, "version": "2.1.168", "sessionId": session, "timestamp": at}
    return {"parentUuid": None, "uuid": f"u{second}", **shared, "type": kind, "message": message, **more}


def _answered(name: str, fresh: int, written: int, read: int, out: int) -> dict[str, Any]:
    counts = {"input_tokens": fresh, "cache_creation_input_tokens": written, "cache_read_input_tokens": read}
    return {"id": name, "model": "claude-opus-4-8", "usage": {**counts, "output_tokens": out}}


def test_claude_code(tmp_path: Path) -> None:
    """`~/.claude/projects/PROJECT/SESSION.jsonl` of version 2.1: a line per block, the usage of the answer in each."""
    rows: list[dict[str, Any]] = [
        {"type": "file-history-snapshot", "messageId": "x", "snapshot": {}},
        _claude("user", 1, "look at it"),
        _claude("assistant", 3, [{"type": "thinking", "thinking": "hm"}], message=_answered("m1", 4, 96, 900, 1)),
        _claude("assistant", 4, [{"type": "tool_use", "name": "Bash"}], message=_answered("m1", 4, 96, 900, 50)),
        _claude("user", 9.5, [{"type": "tool_result", "content": "files"}]),
        _claude("assistant", 12, [{"type": "text", "text": "done"}], message=_answered("m2", 4, 96, 1000, 20)),
        _claude("user", 20, "other", isSidechain=True, agentId="a7"),
        _claude("assistant", 21, "sub", isSidechain=True, agentId="a7", message=_answered("m3", 1, 499, 0, 9)),
        _claude("assistant", 22, "API Error", message={**_answered("m4", 0, 0, 0, 0), "model": "<synthetic>"}),
        {"type": "system", "subtype": "compact_boundary", "sessionId": "s1", "timestamp": "2026-06-09T13:42:30Z"},
        _claude("user", 31, "This session is continued", isCompactSummary=True),
        _claude("assistant", 33, "so", message=_answered("m5", 10, 290, 900, 30)),
    ]
    again = [
        _claude("assistant", 3, [{"type": "text", "text": "x"}], "s2", message=_answered("m1", 4, 96, 900, 50)),
        _claude("user", 40, "go on", "s2"),
        _claude("assistant", 42, "yes", "s2", message=_answered("m6", 100, 100, 1200, 5)),
    ]
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "s1.jsonl", *rows)
    jsonl(tmp_path / "sub" / "s2.jsonl", *again)
    assert detect(tmp_path)[0] == "claude-code"
    session, agent, resumed = load("claude-code", tmp_path)
    # 1,000 tokens and 50 out; the next prompt of 1,100 extends them, and comes 5.5 s after the last block.
    # The compaction keeps the 900 tokens of the system prompt that the cache had, although the prompt grew.
    assert shape(session) == [(1000, 50, 0.0, None), (50, 20, 5.5, None), (300, 30, 19.0, 900)]
    assert (agent.session_id, agent.arrival_s, shape(agent)) == ("s1/a7", 19.0, [(500, 9, 0.0, None)])
    assert (resumed.session_id, shape(resumed)) == ("s2", [(1400, 5, 0.0, None)])
    prefix = SharedPrefix(id="system-claude-code-2.1.168-claude-opus-4-8-main", tokens=900)
    assert [session.shared_prefix, agent.shared_prefix, resumed.shared_prefix] == [prefix, None, prefix]
    assert NOTES == []


def test_sub_agents_without_a_name_are_told_apart_by_their_first_line(tmp_path: Path) -> None:
    """Version 1 wrote two parallel sub-agents as side chains into the file of their parent."""
    rows = []
    for at, (name, parent, prompt) in enumerate(
        [("a", None, 0), ("b", None, 0), ("c", "a", 1000), ("d", "b", 2000), ("e", "c", 1100)]
    ):
        message = _answered(name, prompt, 0, 0, 10) if prompt else {}
        row = _claude("assistant" if prompt else "user", at, "x", isSidechain=True, message=message)
        rows.append(row | {"uuid": name, "parentUuid": parent})
    first, second = load("claude-code", jsonl(tmp_path / "s.jsonl", *rows))
    assert [item[:2] for item in shape(first)] == [(1000, 10), (90, 10)]
    assert [item[:2] for item in shape(second)] == [(2000, 10)]


def _codex(second: float, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": f"2026-09-26T05:00:{second:06.3f}Z", "type": kind, "payload": payload}


def _counted(second: float, total: int, prompt: int, cached: int, out: int) -> dict[str, Any]:
    last = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": out, "reasoning_output_tokens": 2}
    info = {"total_token_usage": {"input_tokens": total}, "last_token_usage": last, "model_context_window": 272000}
    return _codex(second, "event_msg", type="token_count", info=info, rate_limits={})


def _codex_rows() -> list[dict[str, Any]]:
    call = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"}
    return [
        _codex(0, "session_meta", id="t-1", cwd="/x", originator="codex_cli", base_instructions={"text": "be good"}),
        _codex(0.1, "turn_context", model="gpt-5", cwd="/x"),
        _codex(1, "response_item", type="message", role="user", content=[{"type": "input_text", "text": "do it"}]),
        _codex(1, "event_msg", type="user_message", message="do it"),
        _codex(1.5, "event_msg", type="token_count", info=None, rate_limits={}),
        _codex(2, "response_item", type="reasoning", summary=[], encrypted_content="xx"),
        _codex(3, "response_item", **call),
        _counted(3.1, 800, 800, 0, 40),
        _codex(8, "response_item", type="function_call_output", call_id="c1", output="three words here"),
        _codex(9, "response_item", type="message", role="assistant", content=[{"type": "output_text", "text": "ok"}]),
        _counted(9.2, 1700, 900, 768, 12),
        _counted(9.3, 1700, 900, 768, 12),
    ]


def test_codex(tmp_path: Path) -> None:
    """`~/.codex/sessions/Y/M/D/rollout-*.jsonl`: a token_count per call, and again when only the limits changed."""
    folder = tmp_path / "2026"
    folder.mkdir()
    jsonl(folder / "rollout-a.jsonl", *_codex_rows())
    fork = [_codex(30, "session_meta", id="t-2", forked_from_id="t-1"), *_codex_rows()[2:]]
    more = [
        _codex(31, "response_item", type="message", role="user", content=[{"type": "input_text", "text": "more"}]),
        _codex(33, "response_item", type="message", role="assistant", content=[]),
        _counted(33.1, 2700, 1000, 896, 8),
    ]
    jsonl(folder / "rollout-b.jsonl", *fork, *more)
    assert detect(tmp_path) == ("codex", "its rows have type=session_meta")
    first, fork_session = load("codex", tmp_path, with_text=True)
    assert (first.session_id, shape(first)) == ("t-1", [(800, 40, 0.0, None), (60, 12, 5.0, None)])
    assert first.rounds[1].text == "three words here"
    assert (fork_session.session_id, fork_session.arrival_s) == ("t-2", 30.0)
    assert shape(fork_session)[-1][:2] == (1000, 8)


def test_codex_without_usage_counts_words(tmp_path: Path) -> None:
    rows = [row for row in _codex_rows() if row["payload"].get("type") != "token_count"]
    (session,) = load("codex", jsonl(tmp_path / "r.jsonl", *rows))
    assert [item[:2] for item in shape(session)] == [(2 + 4 + 2 + 4 + 3, 2 + 1), (3 + 4 + 3, 1 + 1)]


HISTORY = [
    {"role": "system", "content": "you act", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "fix this issue", "agent": "main", "message_type": "observation"},
    {"role": "assistant", "content": "I look\nls", "thought": "I look", "action": "ls", "agent": "main"},
    {"role": "user", "content": "a b c d", "agent": "main", "message_type": "observation"},
    {"role": "assistant", "content": "submit", "agent": "main"},
]


def test_swe_agent(tmp_path: Path) -> None:
    """`INSTANCE.traj` of SWE-agent 0.7 and 1.0 (history), and of 1.1 (`query` of each step is its whole prompt)."""
    steps: list[dict[str, Any]] = [
        {"action": "ls", "observation": "a b c d", "response": "I look\nls", "execution_time": 2.5},
        {"response": "submit"},
    ]
    old = {"environment": "swe_main", "trajectory": steps, "history": HISTORY, "info": {"model_stats": {}}}
    path = tmp_path / "repo__repo-1.traj"
    path.write_text(json.dumps(old, indent=2))
    assert detect(path)[0] == "swe-agent"
    (session,) = load("swe-agent", path)
    _, second = shape(session)
    assert (second[0], second[2]) == (4 + 4 + 3, 2.5)
    elided = [*HISTORY[:2], HISTORY[2], say("user", "elided")]
    queries = [{**steps[0], "query": HISTORY[:2]}, {**steps[1], "query": elided}]
    path.write_text(json.dumps({"trajectory": queries, "history": HISTORY, "info": {}}))
    (session,) = load("swe-agent", path)
    assert shape(session) == [(2 + 4 + 3 + 4 + 3, 3 + 1, 0.0, None), (1 + 4 + 3, 1 + 1, 2.5, None)]
    assert session.shared_prefix is not None
    usage = {"usage": {"prompt_tokens": 700, "completion_tokens": 30}}
    answer = {"role": "assistant", "content": "x", "extra": {"response": usage, "timestamp": 1_764_300_004.5}}
    messages = [say("system", "y"), say("user", "z"), answer]
    mini = {"info": {}, "messages": messages, "trajectory_format": "mini-swe-agent-1", "instance_id": "i"}
    path.write_text(json.dumps(mini))
    assert [(each.session_id, shape(each)) for each in load("swe-agent", path)] == [("i", [(700, 30, 0.0, None)])]
    assert detect(path)[0] == "swe-agent"


def _oh(second: int, source: str, **more: Any) -> dict[str, Any]:
    return {"id": second, "timestamp": f"2026-03-01T10:00:{second:02}.123456", "source": source, "message": "", **more}


def _response(name: str, prompt: int, out: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": out, "prompt_tokens_details": {"cached_tokens": 5}}
    return {"id": name, "usage": usage, "choices": [{"message": {"role": "assistant", "content": "I act"}}]}


def test_openhands(tmp_path: Path) -> None:
    """An exported trajectory: an array of events; two actions of one response are one answer."""
    events = [
        _oh(0, "agent", action="system", args={"content": "you act", "tools": [{"name": "run"}]}),
        _oh(1, "user", action="message", args={"content": "fix it"}),
        _oh(2, "agent", action="recall", args={}),
        _oh(5, "agent", action="run", args={}, tool_call_metadata={"model_response": _response("r1", 500, 20)}),
        _oh(6, "agent", action="run", args={}, tool_call_metadata={"model_response": _response("r1", 500, 20)}),
        _oh(9, "agent", observation="run", content="done", cause=5),
        _oh(12, "agent", action="finish", args={}, tool_call_metadata={"model_response": _response("r2", 600, 7)}),
    ]
    path = tmp_path / "conv.json"
    path.write_text(json.dumps(events))
    assert detect(path)[0] == "openhands"
    (session,) = load("openhands", path)
    assert (session.session_id, shape(session)) == ("conv", [(500, 20, 0.0, None), (80, 7, 3.0, None)])
    usages = [{"response_id": name, "prompt_tokens": n, "completion_tokens": 3} for name, n in (("r1", 50), ("r2", 60))]
    bare = [
        {**event, "tool_call_metadata": {"model_response": {"id": name}}}
        for event, name in zip(events[3::3], ("r1", "r2"), strict=True)
    ]
    output = {
        "instance_id": "i-1",
        "history": [*events[:2], bare[0], events[5], bare[1]],
        "metrics": {"token_usages": usages},
    }
    path = jsonl(tmp_path / "output.jsonl", output)
    assert detect(path)[0] == "openhands"
    (session,) = load("openhands", path)
    assert (session.session_id, [item[:2] for item in shape(session)]) == ("i-1", [(50, 3), (7, 3)])


def test_openhands_events_of_its_second_version(tmp_path: Path) -> None:
    """A file per event below the folder of the conversation."""
    action = {"thought": [{"type": "text", "text": "I look"}], "tool_call": {"name": "run", "arguments": "ls"}}
    events: list[dict[str, Any]] = [
        {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": {"type": "text", "text": "you act"}},
        {
            "kind": "MessageEvent",
            "source": "user",
            "llm_message": say("user", None) | {"content": [{"text": "fix it"}]},
        },
        {"kind": "ActionEvent", "source": "agent", "llm_response_id": "r1", **action},
        {"kind": "ObservationEvent", "source": "environment", "observation": {"content": [{"text": "a b c"}]}},
        {"kind": "MessageEvent", "source": "agent", "llm_message": say("assistant", "bye"), "llm_response_id": "r2"},
    ]
    folder = tmp_path / "conv-9" / "events"
    folder.mkdir(parents=True)
    for number, event in enumerate(events):
        at = {"timestamp": f"2026-03-01T10:00:0{2 * number}"}
        (folder / f"event-{number:05}-x.json").write_text(json.dumps(event | at))
    assert detect(tmp_path)[0] == "openhands"
    (session,) = load("openhands", tmp_path)
    assert session.session_id == "conv-9"
    assert shape(session) == [(2 + 4 + 2 + 4 + 3, 4 + 1, 0.0, None), (3 + 4 + 3, 1 + 1, 2.0, None)]
