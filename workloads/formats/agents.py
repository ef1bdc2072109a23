"""Formats of recorded agents: Claude Code, Codex, SWE-agent, OpenHands, TraceLab, kv-cache-tester."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ampd.errors import UserError
from workloads.formats.chat import (
    Turns,
    Usage,
    is_conversation,
    message_words,
    prompt_of,
    role_of,
    turns_of,
    usage_of,
    with_answer,
)
from workloads.formats.loader import (
    Row,
    Rows,
    as_list,
    as_object,
    count_of,
    file_stem,
    first_of,
    parsed,
    part_of,
    seconds_of,
    text_of,
    time_s,
)
from workloads.formats.rounds import Request

# -- Claude Code's session files: `~/.claude/projects/*/SESSION.jsonl`, and those of its sub-agents


def read_claude_code(rows: Rows) -> Iterator[Request]:
    """Lines with the same `message.id` are blocks of one answer. A sub-agent is a session of its own.

    A resumed session repeats the lines of the one before; these count once.
    """
    contexts: dict[str, Turns] = {}
    answered: dict[str, str] = {}
    roots: dict[Any, str] = {}
    for row in rows:
        data, where = row.data, row.where
        name = text_of(data, "sessionId", "session_id") or file_stem(row.name)
        root = roots[str(data.get("uuid"))] = roots.get(data.get("parentUuid")) or str(data.get("uuid"))
        if agent := text_of(data, "agentId", "parent_tool_use_id") or (root if data.get("isSidechain") else None):
            name += f"/{agent}"
        turns = contexts.setdefault(name, Turns(name))
        if data.get("subtype") == "compact_boundary":
            turns.forget()
        message = data.get("message")
        if data.get("type") not in ("user", "assistant") or not isinstance(message, dict):
            continue
        at_s = time_s(data, "timestamp", where=where)
        if data["type"] == "user":
            turns.put_input(message_words(message), at_s)
            continue
        key = text_of(message, "id") or text_of(data, "requestId", "uuid") or where
        if message.get("model") == "<synthetic>" or answered.setdefault(key, name) != name:
            continue
        kind = "agent" if "/" in name else "main"
        turns.system_prompt = f"claude-code-{data.get('version')}-{message.get('model')}-{kind}"
        turns.put_output(message, where, at_s, key, usage_of(message.get("usage"), where))
    yield from _closed(contexts.values())


def _closed(contexts: Iterable[Turns]) -> Iterator[Request]:
    for turns in contexts:
        turns.close()
        yield from turns.requests


# -- Codex' session files: `~/.codex/sessions/**/rollout-*.jsonl`

_CODEX_INPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")


def read_codex(rows: Rows) -> Iterator[Request]:
    """Each `token_count` with a new total ends a call. A fork repeats the events of its parent; these count once."""
    contexts: dict[str, Turns] = {}
    counted: set[tuple[Any, ...]] = set()
    for row in rows:
        data, where = row.data, row.where
        payload = part_of(data, "payload") or data
        kind = payload.get("type") if data.get("type") in ("response_item", "event_msg") else data.get("type")
        if row.name not in contexts:
            contexts[row.name] = Turns(text_of(payload, "id", "session_id") or file_stem(row.name))
            words = prompt_of({"prompt": first_of(payload, "base_instructions", "instructions")})
            if words:
                contexts[row.name].put_input("\n".join(words.messages), system=True)
        turns, at_s = contexts[row.name], time_s(data, "timestamp", where=where)
        if kind == "compacted":
            turns.forget()
        elif kind == "turn_context":
            turns.system_prompt = f"codex-{payload.get('model')}"
        elif kind == "token_count" and isinstance(payload.get("info"), dict):
            info = payload["info"]
            key = (data.get("timestamp"), json.dumps(info.get("total_token_usage"), sort_keys=True))
            if (row.name, key[1]) not in counted:
                turns.count(usage_of(info.get("last_token_usage"), where))
                turns.close(repeated=key in counted)
            counted |= {key, (row.name, key[1])}
        elif kind in _CODEX_INPUTS or (kind == "message" and role_of(payload) != "assistant"):
            turns.put_input(message_words(payload), at_s)
        elif kind in ("message", "reasoning") or (data.get("type") != "event_msg" and str(kind).endswith("_call")):
            part = payload if kind == "message" else {"content": [payload]}
            turns.put_output(part, where, at_s, "answer")
    yield from _closed(contexts.values())


# -- SWE-agent's `.traj` and mini-swe-agent's: the messages of a run


def read_swe_agent(rows: Rows) -> Iterator[Request]:
    """The prompts that a step records, else the history. The gap before a call is the time of the command before."""
    for row in rows:
        data, where = row.data, row.where
        name = text_of(data, "instance_id", "environment") or file_stem(row.name)
        name = name if name != "main" else file_stem(row.name)
        steps = as_list(parsed(data.get("trajectory") or []), f"{where}: trajectory")
        found = list(_steps(steps, name, where))
        if not found:
            history: list[Any] = next(
                (h for key in ("messages", "history", "trajectory") if is_conversation(h := parsed(data.get(key)))), []
            )
            main = [item for item in history if item.get("agent") in (None, history[0].get("agent"), "main", "primary")]
            found = turns_of(main, name, where, part=where)
            waits_s = [seconds_of(step, "execution_time", where=where) for step in steps]
            for request, wait_s in zip(found[1:], waits_s, strict=False):
                request.gap_s = wait_s if request.start_s is None else None
        if not found:
            rows.leave_out("no answer of a model", where)
        yield from found


def _steps(steps: list[Any], name: str, where: str) -> Iterator[Request]:
    wait_s: float | None = None
    for item in steps:
        step = as_object(item, f"{where}: trajectory")
        prompt = first_of(step, "query", "messages")
        if not is_conversation(prompt):
            return
        messages = [message for message in prompt if isinstance(message, dict)]
        words = prompt_of({"messages": messages})
        answer = {"content": first_of(step, "response", "thought") or "", "tool_calls": step.get("tool_calls")}
        request = Request(where, session=name, part=where, gap_s=wait_s)
        if words:
            request = replace(request, messages=words.messages, system_messages=words.system_messages)
        yield with_answer(request, answer)
        wait_s = seconds_of(step, "execution_time", where=where)


# -- OpenHands: the events of a conversation, as an array, as one file each, or as `history` of a benchmark's output


def read_openhands(rows: Rows) -> Iterator[Request]:
    """Actions of the agent with the same response are one answer; everything else is input."""
    contexts: dict[str, Turns] = {}
    for row in rows:
        data, where = row.data, row.where
        folder = Path(row.name).parent
        name = (
            str(folder.parent if folder.name == "events" else folder)
            if Path(row.name).stem.startswith("event-")
            else file_stem(row.name)
        )
        if isinstance(history := parsed(data.get("history")), list):
            name = text_of(data, "instance_id") or Path(where).name
            metrics = part_of(data, "metrics")
            recorded = {
                str(item.get("response_id")): usage_of(item, where) for item in metrics.get("token_usages") or ()
            }
        else:
            history, recorded = [data], {}
        turns = contexts.setdefault(name, Turns(name))
        for item in history:  # old ones hold pairs of an action and its observation
            for event in item if isinstance(item, list) else [item]:
                _put_event(turns, as_object(event, f"{where}: history"), recorded, where)
    yield from _closed(contexts.values())


_SILENT = ("change_agent_state", "agent_state_changed", "recall", "null", "condensation", "Condensation")
"""Events that are not in the prompt."""


def _put_event(turns: Turns, event: dict[str, Any], recorded: dict[str, Usage], where: str) -> None:
    kind = str(event.get("kind") or event.get("action") or event.get("observation") or "")
    at_s = time_s(event, "timestamp", where=where)
    metadata = part_of(event, "tool_call_metadata")
    response = part_of(metadata, "model_response")
    if kind in ("system", "SystemPromptEvent"):
        args = part_of(event, "args")
        content = first_of(event, "system_prompt", "content") or args.get("content") or event.get("message")
        if tools := event.get("tools") or args.get("tools"):
            turns.put_input(json.dumps(tools, ensure_ascii=False), at_s, system=True)
        turns.put_input(message_words({"content": content}), at_s, system=True)
    elif kind in _SILENT:
        return
    elif event.get("source") == "agent" and (event.get("action") or kind in ("ActionEvent", "MessageEvent")):
        key = text_of(response, "id") or text_of(event, "llm_response_id", "response_id")
        usage = recorded.get(str(key)) or usage_of(response.get("usage"), where)
        turns.put_output(_event_answer(event, response), where, at_s, key, usage)
    elif event.get("source") == "user" or event.get("observation") or "Observation" in kind or "Error" in kind:
        body = first_of(event, "llm_message", "observation" if event.get("kind") else "content", "error", "message")
        words = message_words(body) if isinstance(body, dict) else message_words({"content": body})
        turns.put_input(words, at_s)


def _event_answer(event: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """The model's own message if the event has it; else what the action says."""
    for choice in response.get("choices") or ():
        if isinstance(choice, dict) and isinstance(choice.get("message"), dict):
            return dict(choice["message"])
    if isinstance(message := event.get("llm_message"), dict):
        return message
    args = part_of(event, "args")
    calls = [call] if isinstance(call := event.get("tool_call"), dict) else []
    content = (
        [event.get("thought"), event.get("reasoning_content")] if event.get("kind") else [event.get("message"), args]
    )
    return {
        "content": [part for item in content if item for part in (item if isinstance(item, list) else [item])],
        "tool_calls": calls,
    }


# -- TraceLab: coding-agent rounds with token counts and the wall time of every tool

_INPUT_EVENTS = ("user_message", "tool_result")


def read_tracelab(rows: Rows) -> Iterator[Request]:
    """`prefix_tokens` is what the provider's cache had; the gap without times is the longest tool before."""
    previous: Row | None = None
    for row in sorted(rows, key=lambda row: (str(row.data.get("session_id")), _required(row, "round_index"))):
        data, where = row.data, row.where
        same = previous is not None and previous.data.get("session_id") == data.get("session_id")
        start_s, before_s = _last_event_s(row, inputs=True), _last_event_s(previous, inputs=False) if previous else None
        gap_s = None
        if previous and same and (start_s is None or before_s is None):
            tools = previous.data.get("tools") or []
            walls_s = (seconds_of(tool, "tool_wall_latency_ms", where=previous.where, unit_s=1e-3) for tool in tools)
            gap_s = max((wall_s for wall_s in walls_s if wall_s is not None), default=0.0)
        yield Request(
            where,
            session=str(data.get("session_id")),
            start_s=start_s,
            end_s=_last_event_s(row, inputs=False),
            gap_s=gap_s,
            prompt_tokens=_required(row, "input_tokens_total"),
            output_tokens=_required(row, "output_tokens"),
            cached_tokens=count_of(data, "prefix_tokens", where=where),
        )
        previous = row


def _required(row: Row, key: str) -> int:
    value = count_of(row.data, key, where=row.where)
    if value is None:
        raise UserError(f"{row.where}: there is no {key}")
    return value


def _last_event_s(row: Row, *, inputs: bool) -> float | None:
    events = [
        event for event in row.data.get("timing_events") or [] if (event.get("event_type") in _INPUT_EVENTS) is inputs
    ]
    times_s = (time_s(event, "timestamp", where=row.where) for event in events)
    return max((at_s for at_s in times_s if at_s is not None), default=None)


# -- kv-cache-tester: anonymised coding-agent sessions with token counts, block hashes, think and API times

DEFAULT_BLOCK_TOKENS = 64


class _Blocks(NamedTuple):
    """How many tokens a hash stands for, and in which traces it stands for the same ones."""

    tokens: int
    scope: str


def read_kv_cache_tester(rows: Rows) -> Iterator[Request]:
    """One session per trace, and one per nested sub-agent, which has its own context."""
    for row in rows:
        name = str(row.data.get("id") or file_stem(row.name))
        block_tokens = count_of(row.data, "block_size", where=row.where) or DEFAULT_BLOCK_TOKENS
        requests = as_list(row.data.get("requests"), f"{row.where}: requests")
        scope = "all" if row.data.get("hash_id_scope") == "global" else row.where
        yield from _agent(requests, name, 0.0, _Blocks(block_tokens, scope), row.where, rows)


def _agent(
    requests: list[Any], name: str, origin_s: float, blocks: _Blocks, where: str, rows: Rows
) -> Iterator[Request]:
    own = 0
    agents = 0
    for index, item in enumerate(requests):
        place = f"{where}: request {index}"
        request = as_object(item, place)
        start_s = seconds_of(request, "t", where=place)
        if isinstance(inner := request.get("requests"), list):
            agents += 1
            yield from _agent(inner, f"{name}/agent{agents}", origin_s + (start_s or 0.0), blocks, where, rows)
            continue
        if request.get("type") == "subagent":
            rows.leave_out("a sub-agent without its requests", place)
            continue
        took_s = seconds_of(request, "api_time", where=place)
        hashes = [(blocks.scope, block) for block in request.get("hash_ids") or ()]
        yield Request(
            place,
            session=name,
            part=where,
            start_s=origin_s if not own else None if start_s is None else origin_s + start_s,
            end_s=None if start_s is None or took_s is None else origin_s + start_s + took_s,
            gap_s=seconds_of(request, "think_time", where=place),
            prompt_tokens=count_of(request, "in", where=place) or 0,
            output_tokens=count_of(request, "out", where=place) or 0,
            hashes=hashes,
            block_tokens=blocks.tokens,
        )
        own += 1
