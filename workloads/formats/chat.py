"""Formats that record chat messages, and the words, roles and usage of messages in the forms of all providers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ampd.errors import UserError
from workloads.formats.loader import (
    Rows,
    as_list,
    as_object,
    count_of,
    file_stem,
    first_of,
    parsed,
    part_of,
    text_of,
    time_s,
)
from workloads.formats.rounds import Request

# -- the words of messages: OpenAI's two forms, Anthropic's blocks, Google's parts, and those of spans

_ANSWERS = ("assistant", "ai", "gpt", "model", "bot", "agent", "chatgpt", "bing", "bard")
_SYSTEM = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_REASONING_PARTS = ("reasoning", "thinking", "thought", "redacted_thinking")
_BODIES = ("content", "parts", "text", "value", "output", "system_prompt")
_NO_WORDS = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "redacted_thinking")
_PART_WORDS = (
    *("text", "thinking", "thought", "reasoning", "summary", "refusal", "title", "name", "input", "arguments", "query"),
    *("content", "result", "response", "output", "source", "data", "functionCall", "functionResponse"),
)
_THINK_TAG = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def message_words(message: dict[str, Any], *, reasoning: bool = True) -> str:
    """The words of one message for a model: content, reasoning, function and tool calls.

    `reasoning=False` leaves out what agents and chat templates leave out when they send an answer back.
    """
    parts = [_words(message[key]) for key in _REASONING if reasoning and message.get(key)]
    body = _words(first_of(message, *_BODIES), reasoning=reasoning)
    parts.append(body if reasoning else _THINK_TAG.sub("", body))
    if call := message.get("function_call"):
        parts.append(_call_words(call))
    for call in parsed(message.get("tool_calls")) or ():
        if isinstance(call, dict):
            parts.append(_call_words(call.get("function") or call))
    return "\n".join(part for part in parts if part)


def _words(content: Any, *, reasoning: bool = True) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (_part_words(part, reasoning) if isinstance(part, dict) else str(part) for part in content)
        return "\n".join(part for part in parts if part)
    return _part_words(content, reasoning) if isinstance(content, dict) else str(content)


def _part_words(part: dict[str, Any], reasoning: bool) -> str:
    """The words of a block or part: text, a call with its arguments, a result; encrypted parts and images have none."""
    kind = part.get("type")
    if kind in _NO_WORDS or (kind in _REASONING_PARTS and not reasoning):
        return ""
    if "function" in part:
        return _call_words(as_object(part["function"], "function"))
    known = [(key, part[key]) for key in _PART_WORDS if part.get(key)]
    if not known:
        return "" if "type" in part else json.dumps(part, ensure_ascii=False)
    return " ".join(
        json.dumps(value, ensure_ascii=False) if isinstance(value, dict) and key in _AS_JSON else _words(value)
        for key, value in known
    )


_AS_JSON = ("input", "arguments", "query", "functionCall", "functionResponse", "response", "result", "output", "data")


def _call_words(call: dict[str, Any]) -> str:
    arguments = first_of(call, "arguments", "input", "args")
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call.get('name') or ''} {words}"


def role_of(message: Mapping[str, Any]) -> str:
    role = str(first_of(message, "role", "from") or "user").lower()
    return "assistant" if role in _ANSWERS else "system" if role in _SYSTEM else role


def is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)
    )


class Prompt(NamedTuple):
    """A prompt's words by message, and how many of them are tools and system prompts."""

    messages: tuple[str, ...]
    system_messages: int


def prompt_of(request: Mapping[str, Any]) -> Prompt | None:
    """The prompt of a request body: `messages`, `input` of responses, `prompt`, with system prompts and tools first."""
    body = parsed(first_of(request, *_PROMPT_KEYS))
    if isinstance(body, dict):  # {"messages": [...]}, as frameworks log their inputs
        return prompt_of(body) or Prompt((_words(body),), 0)
    if not body:
        return None
    before = _system_words(request)
    items = [body] if isinstance(body, str) else body
    words = [message_words(item) if isinstance(item, dict) else str(item) for item in items]
    roles = [role_of(item) if isinstance(item, dict) else "user" for item in items]
    system = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    return Prompt((*before, *words), len(before) + system)


def _system_words(request: Mapping[str, Any]) -> list[str]:
    """Tools and system prompts that stand beside the messages of a request."""
    tools = parsed(first_of(request, "tools", "functions"))
    system = parsed(first_of(request, "system", "instructions", "system_instruction", "systemInstruction"))
    return [words for words in (json.dumps(tools, ensure_ascii=False) if tools else "", _words(system)) if words]


def answer_of(response: Any) -> dict[str, Any] | None:
    """The message in a response of any provider; None: there is none."""
    response = parsed(response)
    if isinstance(response, str):
        return {"content": response}
    if isinstance(response, list):
        return {"content": [part for item in response for part in _items_of(item)]} if response else None
    if not isinstance(response, dict):
        return None
    for key in ("choices", "candidates"):
        for choice in response.get(key) or ():
            found = first_of(as_object(choice, key), "message", "content", "text", "delta")
            return found if isinstance(found, dict) else {"content": found}
    for key in ("message", "output"):
        if response.get(key) is not None:
            return answer_of(response[key])
    is_message = any(key in response for key in ("content", "text", "parts", "tool_calls", "function_call"))
    return response if is_message else None


def _items_of(item: Any) -> list[Any]:
    """The parts of an output item: a message of a response wraps them once more."""
    inner = first_of(item, "content", "parts") if isinstance(item, dict) and "role" in item else None
    return [{"text": message_words(item)}] if inner is not None else [item]


def with_answer(request: Request, answer: dict[str, Any] | None) -> Request:
    if answer is None:
        return request
    words, bare = message_words(answer), message_words(answer, reasoning=False)
    return replace(request, answer=words, bare_answer=None if bare == words else bare)


# -- recorded usage: OpenAI's, Anthropic's, Google's and Langfuse's names


@dataclass(frozen=True, slots=True)
class Usage:
    """Recorded tokens of a call; None: not recorded."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


_PROMPTS = (
    *("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "promptTokenCount", "inputUsage", "input_usage"),
    "input",
)
_OUTPUTS = (
    *("completion_tokens", "output_tokens", "completionTokens", "outputTokens", "candidatesTokenCount"),
    *("outputUsage", "output_usage", "output"),
)
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "input_token_details")
_APART = ("cache_read_input_tokens", "cacheReadInputTokens", "input_cached_tokens", "input_cache_read")
_CACHED = ("cached_input_tokens", "cached_tokens", "cache_read_tokens", "cache_read", "cachedContentTokenCount")
_WRITTEN = ("cache_creation_input_tokens", "cacheCreationInputTokens", "input_cache_creation")


def usage_of(record: Any, where: str) -> Usage:
    """The tokens that a provider counted. No tokens at all are no record, as streams without usage have it.

    Anthropic's `input_tokens` are only those that the cache neither had nor stored; all others' prompts are whole.
    """
    if not isinstance(record, dict):
        return Usage()
    prompt = count_of(record, *_PROMPTS, where=where)
    output = count_of(record, *_OUTPUTS, where=where)
    details = next((part for key in _DETAILS if (part := part_of(record, key))), {})
    apart = count_of(record, *_APART, where=where)
    written = count_of(record, *_WRITTEN, where=where)
    if prompt is not None and "prompt_tokens" not in record and (apart or written):
        total = count_of(record, "total", "total_tokens", "totalTokens", where=where)
        whole = prompt + (output or 0) + (apart or 0) + (written or 0)
        prompt = whole - (output or 0) if total is None or whole <= total else prompt
    cached = count_of({**details, **record}, *_APART, *_CACHED, where=where)
    if not prompt and not output:
        return Usage()
    thoughts = count_of(record, "thoughtsTokenCount", where=where)
    return Usage(prompt, None if output is None else output + (thoughts or 0), cached)


# -- conversations: every answer is a call whose prompt is all before it


class Turns:
    """Makes requests of the inputs and outputs of one context, in their order.

    Outputs that follow each other with the same `key` are parts of one answer.
    """

    def __init__(self, session: str, part: str | None = None) -> None:
        self.requests: list[Request] = []
        self.system_prompt: str | None = None
        self._session, self._part = session, part
        self._messages: list[str] = []
        self._system_messages = 0
        self._last_s: float | None = None
        self._open: Request | None = None
        self._key: str | None = None
        self._parts: list[tuple[str, str]] = []

    def put_input(self, words: str, at_s: float | None = None, *, system: bool = False) -> None:
        self.close()
        if system and self._system_messages == len(self._messages):
            self._system_messages += 1
        self._messages.append(words)
        self._last_s = at_s if at_s is not None else self._last_s

    def put_output(
        self, message: dict[str, Any], where: str, at_s: float | None = None, key: str | None = None,
        usage: Usage | None = None, gap_s: float | None = None,
    ) -> None:  # fmt: skip
        """`usage`: of the whole answer so far; of its parts the last counts."""
        if self._open is None or key is None or key != self._key:
            self.close()
            self._key, self._open = (
                key,
                Request(
                    where=where,
                    session=self._session,
                    part=self._part,
                    start_s=self._last_s if self._last_s is not None else at_s,
                    gap_s=gap_s,
                    messages=tuple(self._messages),
                    system_messages=self._system_messages,
                    system_prompt=self.system_prompt,
                ),
            )
        self._open.end_s = at_s
        self._parts.append((message_words(message), message_words(message, reasoning=False)))
        if usage:
            self.count(usage)

    def count(self, usage: Usage) -> None:
        if self._open and usage.prompt_tokens:
            self._open.prompt_tokens, self._open.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        if self._open and usage.output_tokens:
            self._open.output_tokens = usage.output_tokens

    def close(self, *, repeated: bool = False) -> None:
        """The answer is complete. `repeated`: another session made this call already."""
        if self._open is None:
            return
        words, bare = ("\n".join(filter(None, each)) for each in zip(*self._parts, strict=True))
        self._open.answer, self._open.bare_answer = words, None if bare == words else bare
        if not repeated:
            self.requests.append(self._open)
        self._messages.append(words)
        self._last_s = self._open.end_s if self._open.end_s is not None else self._last_s
        self._open, self._parts = None, []

    def forget(self) -> None:
        """The agent compacted its context."""
        self.close()
        self._messages, self._system_messages = [], 0


def turns_of(
    messages: Sequence[Any], session: str, where: str, *, part: str | None = None, before: Iterable[str] = ()
) -> list[Request]:
    """The calls of a conversation: every message of the assistant but a first one."""
    turns = Turns(session, part)
    for words in before:
        turns.put_input(words, system=True)
    for index, item in enumerate(messages):
        message = as_object(item, f"{where}: messages")
        role = role_of(message)
        at_s = time_s(message, "timestamp", "created_at", where=where)
        if role == "assistant" and index:
            extra = part_of(message, "extra")
            response = part_of(extra, "response")
            usage = usage_of(first_of(message, "usage") or response.get("usage"), where)
            turns.put_output(message, where, at_s or time_s(extra, "timestamp", where=where), usage=usage)
        else:
            turns.put_input(message_words(message), at_s, system=role == "system")
    turns.close()
    return turns.requests


# -- message logs as JSON lines or an array: whole conversations, or requests with their responses

_PROMPT_KEYS = ("messages", "input", "prompt", "contents")
SESSION_KEYS = (
    *("session_id", "conversation_id", "thread_id", "sessionId", "conversationId", "litellm_session_id"),
    *("x-session-id", "session-id", "x-dynamo-session-id", "x-litellm-session-id"),
)
_USER_SESSION = re.compile(r"_session_([\w-]+)$")
_RESPONSES = ("response", "response_body", "responseBody")
_TIMES = ("timestamp", "created_at", "created", "createdAt", "time", "ts", "@timestamp", "start_time", "startTime")
_ENDS = ("end_time", "endTime", "completed_at", "finished_at")


def read_openai(rows: Rows) -> Iterator[Request]:
    """A row is a conversation, whose assistant messages were a call each, or one request with its response."""
    loose: dict[str, list[dict[str, Any]]] = {}
    names: dict[str | None, str] = {}
    logged: set[tuple[str | None, int]] = set()
    table = list(rows)
    followed = {text_of(part_of(row.data, "request") or row.data, "previous_response_id") for row in table} - {None}
    for row in table:
        data, where = row.data, row.where
        if "role" in data and "messages" not in data:
            loose.setdefault(row.name, []).append(data)
            continue
        request = as_object(parsed(first_of(data, "request", "request_body", "requestBody", "body") or data), where)
        answer, usage, prompt = _logged_answer(data), usage_of(_logged_usage(data), where), prompt_of(request)
        if not any(key in request for key in _PROMPT_KEYS) and usage.prompt_tokens is None:
            raise UserError(f"{where}: there is no key messages, input or prompt; is this a log of messages?")
        name, start_s = session_name(data, request), _logged_s(data, _TIMES, where)
        if answer is None and usage.output_tokens is None:
            messages = parsed(first_of(request, "messages", "input"))
            messages = messages if isinstance(messages, list) else []
            found = turns_of(messages, name or Path(where).name, where, before=_system_words(request))
            if not found:
                rows.leave_out("no answer of a model", where)
            # A session that is logged again as it grows repeats its first calls.
            calls = {(call.session, hash((call.messages, call.answer))): call for call in found}
            fresh = [call for key, call in calls.items() if key not in logged]
            logged |= calls.keys()
            yield from (
                replace(call, start_s=call.start_s or (None if at else start_s)) for at, call in enumerate(fresh)
            )
            continue
        before = names.get(text_of(request, "previous_response_id"))
        call = Request(
            where,
            session=name or before,
            start_s=start_s,
            end_s=_logged_s(data, _ENDS, where),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            increment=before is not None and usage.prompt_tokens is None,
        )
        if prompt and (before is None or call.increment):
            call.messages, call.system_messages = prompt
        if (response := text_of(part_of(data, "response"), "id")) in followed:
            call.session = names[response] = call.session or Path(where).name
        yield with_answer(call, answer)
    for name, messages in loose.items():
        yield from turns_of(messages, file_stem(name), name)


def session_name(*records: Mapping[str, Any]) -> str | None:
    """A session's name in a record, its metadata or headers; Claude Code hides it in the name of its user."""
    for record in records:
        metadata = part_of(record, "metadata")
        more = (part_of(record, "headers"), part_of(metadata, "requester_metadata"), part_of(metadata, "user_id"))
        if name := next((name for place in (record, metadata, *more) if (name := text_of(place, *SESSION_KEYS))), None):
            return name
        if match := _USER_SESSION.search(str(metadata.get("user_id"))):
            return match[1]
    return None


def _logged_answer(data: dict[str, Any]) -> dict[str, Any] | None:
    if (found := first_of(data, *_RESPONSES, "output", "completion", "answer")) is not None:
        return answer_of(part_of({"": found}, "").get("body") or found)
    return answer_of({"choices": data["choices"]}) if data.get("choices") else answer_of(data.get("message"))


def _logged_usage(data: dict[str, Any]) -> Any:
    responses = [part_of(data, key) for key in _RESPONSES]
    places = (data, *responses, *(part_of(response, "body") for response in responses))
    found = (parsed(first_of(place, "usage", "usageMetadata")) for place in places)
    return next((usage for usage in found if usage), None)


def _logged_s(data: dict[str, Any], keys: tuple[str, ...], where: str) -> float | None:
    """When a request was made or ended; None: the row does not say, or in a form that nobody can read."""
    for part in (data, *(parsed(data.get(key)) for key in ("request", "response"))):
        if isinstance(part, dict) and first_of(part, *keys) is not None:
            try:
                return time_s(part, *keys, where=where)
            except UserError:
                return None
    return None


# -- ShareGPT: `{"id", "conversations": [{"from": "human" | "gpt" | "system", "value"}]}`


def read_sharegpt(rows: Rows) -> Iterator[Request]:
    for row in rows:
        turns = as_list(
            parsed(first_of(row.data, "conversations", "conversation", "items")), f"{row.where}: conversations"
        )
        name = text_of(row.data, "id", "conversation_id", "conversation_hash") or Path(row.where).name
        found = turns_of(turns, name, row.where, part=row.where, before=_system_words(row.data))
        if not found:
            rows.leave_out("no answer of a model", row.where)
        yield from found


# -- tau-bench results: `[{task_id, trial, traj: [messages]}]`; every assistant message is one round


def read_tau_bench(rows: Rows) -> Iterator[Request]:
    """Tool schemas are not in the files, so the prompts lack them."""
    for index, row in enumerate(rows):
        name = f"{row.data.get('task_id', index)}-{row.data.get('trial', 0)}"
        found = turns_of(as_list(row.data.get("traj"), f"{row.where}: traj"), name, row.where, part=row.where)
        if not found:
            rows.leave_out("no assistant message", row.where)
        yield from found


# -- ToolBench answers: `answer/*.json`, whose `answer_generation.train_messages` are the model calls of one run


def read_toolbench(rows: Rows) -> Iterator[Request]:
    """The prompt of a call is the function schemas and all its messages but the last."""
    for row in rows:
        answer = as_object(row.data.get("answer_generation"), f"{row.where}: answer_generation")
        calls = as_list(answer.get("train_messages") or [], f"{row.where}: train_messages")
        if not calls:
            rows.leave_out("no train_messages", row.where)
        schemas = json.dumps(answer.get("function") or [], ensure_ascii=False)
        for call in calls:
            messages = [as_object(message, row.where) for message in as_list(call, row.where)]
            prompt = (schemas, *map(message_words, messages[:-1]))
            request = Request(row.where, session=row.name, part=row.where, messages=prompt)
            yield with_answer(request, messages[-1] if messages else {"content": ""})
