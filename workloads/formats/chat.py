"""Formats that record chat messages, whose tokens are counted by a tokenizer: message logs, tau-bench, ToolBench."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.loader import (
    LoadOptions,
    as_list,
    as_object,
    common_prefix,
    file_stem,
    read_json,
    read_json_lines,
    source_files,
    timestamp_s,
)
from workloads.trace import Round, Session, SharedPrefix

# -- rounds from recorded chat messages: token counts by a tokenizer, rewrites from the messages themselves

HEADER_TOKENS = 3
"""Tokens of a chat template before a message: start marker, role, new line (ChatML)."""
_SYSTEM = ("system", "developer")

END_TOKENS = 1
"""Tokens of a chat template after a message."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One model call: the messages of the prompt, and the answer.

    Attributes:
        system_messages: how many of the first messages are tools and system prompts, which agents of a kind share.
        gap_s: seconds between the previous call and this one; 0: not recorded.
    """

    messages: tuple[str, ...]
    output: str
    system_messages: int = 0
    gap_s: float = 0.0


def message_words(message: dict[str, Any]) -> str:
    """The words of one OpenAI-style message for a model: content, function and tool calls."""
    parts = [_words(message.get("content"))]
    if call := message.get("function_call"):
        parts.append(_call_words(call))
    parts += [_call_words(call.get("function") or {}) for call in message.get("tool_calls") or () if call]
    return "\n".join(part for part in parts if part)


def rounds_from_chat(calls: Sequence[ChatCall], options: LoadOptions, where: str) -> tuple[Round, ...]:
    """Rounds of a run of calls whose prompts are lists of messages.

    Every message costs its words plus the four tokens that ChatML puts around it; the answer's header belongs to the
    prompt. A prompt shares the common prefix of messages with the previous context.

    Raises:
        UserError: no call at all.
    """
    if not calls:
        raise UserError(f"{where}: holds no model call")
    rounds: list[Round] = []
    context: tuple[str, ...] = ()
    for call in calls:
        common = common_prefix(context, call.messages)
        new = call.messages[common:]
        rounds.append(
            Round(
                incr_tokens=_tokens(new, options) + HEADER_TOKENS,
                output_tokens=max(1, options.count_tokens(call.output)) + END_TOKENS,
                tool_s=call.gap_s,
                keep_tokens=None if common == len(context) else _tokens(context[:common], options),
                text="\n".join(new) if options.with_text else None,
            )
        )
        context = (*call.messages, call.output)
    return tuple(rounds)


def shared_prefix_of(call: ChatCall, options: LoadOptions) -> SharedPrefix | None:
    """The tools and system prompts that a session's first call begins with, named by their words; None: it has none."""
    words = call.messages[: call.system_messages]
    if not words:
        return None
    name = sha256(json.dumps(words).encode()).hexdigest()[:16]
    return SharedPrefix(id=f"system-{name}", tokens=_tokens(words, options))


def leading_system(messages: Sequence[dict[str, Any]]) -> int:
    """How many of a conversation's first messages are system prompts."""
    return next((at for at, each in enumerate(messages) if each.get("role") not in _SYSTEM), len(messages))


def _tokens(messages: Sequence[str], options: LoadOptions) -> int:
    return sum(options.count_tokens(words) + HEADER_TOKENS + END_TOKENS for words in messages)


def _words(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return json.dumps(content, ensure_ascii=False)


def _call_words(call: dict[str, Any]) -> str:
    arguments = call.get("arguments")
    words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call.get('name') or ''} {words}"


# -- OpenAI message logs as JSON lines: whole conversations, or requests with their responses

_NAMES = ("session_id", "conversation_id", "thread_id")
_TIMES = ("timestamp", "created_at", "created")
_MS_FROM = 1e11
"""A number of at least this is a time in milliseconds: in seconds it would be in the year 5138."""


@dataclass(slots=True)
class _Logged:
    """The calls of a session, with the place of its first row and the time of its first and last request."""

    where: str
    calls: list[ChatCall] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None

    def add(self, calls: Sequence[ChatCall], at_s: float | None) -> None:
        if self.calls and len(calls) == 1 and at_s is not None and self.last_s is not None:
            calls = [replace(calls[0], gap_s=max(at_s - self.last_s, 0.0))]
        if not self.calls:
            self.first_s = at_s
        self.calls += calls
        self.last_s = at_s


class _Chains:
    """Finds the session that a request without a name continues.

    Its prompt begins with all messages of a request there, and with the answer.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, list[str]] = {}

    def taken(self, call: ChatCall) -> str | None:
        """The session with the longest context that the prompt begins with. Only one request continues a context."""
        for context in reversed(_hashes(call.messages)):
            if sessions := self._sessions.get(context):
                return sessions.pop()
        return None

    def put(self, call: ChatCall, session: str) -> None:
        self._sessions.setdefault(_hashes((*call.messages, call.output))[-1], []).append(session)


def _hashes(messages: Sequence[str]) -> list[int]:
    """A hash of the first message, of the first two, and so on."""
    return list(accumulate(messages, lambda before, words: hash((before, words)), initial=0))[1:]


def load_openai(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session per conversation, and one per session id of logged requests.

    A row is a conversation, whose assistant messages were a model call each, or one request with its response:
    `{"messages": [...]}`, `{"messages": [...], "choices": [...]}` or `{"request": {...}, "response": {...}}`. Rows with
    the same `session_id`, `conversation_id` or `thread_id` are one session. A request without one is the next round of
    the session whose messages and answer it begins with. `tools` are a part of the prompt. The gap before a request is
    the difference of the two times (`timestamp`, `created_at`, `created`), which includes the previous answer's.
    """
    by_session = _sessions(path, options)
    starts_s = [logged.first_s for logged in by_session.values() if logged.first_s is not None]
    origin_s = min(starts_s, default=0.0)
    for name, logged in by_session.items():
        if logged.calls:
            yield Session(
                session_id=name,
                arrival_s=0.0 if logged.first_s is None else logged.first_s - origin_s,
                rounds=rounds_from_chat(logged.calls, options, logged.where),
                shared_prefix=shared_prefix_of(logged.calls[0], options),
            )
        else:
            options.note(f"{logged.where}: no answer of a model, left out")


def _sessions(path: Path, options: LoadOptions) -> dict[str, _Logged]:
    by_session: dict[str, _Logged] = {}
    chains, unnamed, chained, untimed = _Chains(), 0, 0, 0
    for file in source_files(path, ".jsonl", ".json"):
        for where, row in read_json_lines(file):
            calls, name, at_s = _logged_calls(row, where), _name_of(row), _time_s(row, where)
            is_request = len(calls) == 1 and _answer(row, where) is not None
            if name is None and is_request:
                unnamed += 1
                name = chains.taken(calls[0])
                chained += name is not None
            name = name or Path(where).name
            if is_request:
                chains.put(calls[0], name)
                untimed += name in by_session and at_s is None
            by_session.setdefault(name, _Logged(where)).add(calls, at_s)
    if unnamed:
        options.note(
            f"{path}: {unnamed} requests name no session; {chained} of them begin with the messages and the answer of "
            "an earlier one and are its next round, the others begin a session"
        )
    if untimed:
        options.note(
            f"{path}: {untimed} later requests have no time that can be read ({', '.join(_TIMES)}), "
            "so the gap before them is 0"
        )
    return by_session


def _name_of(row: dict[str, Any]) -> str | None:
    metadata = row.get("metadata")
    places = (row, metadata if isinstance(metadata, dict) else {})
    found = (place.get(name) for place in places for name in _NAMES)
    return next((str(name) for name in found if name), None)


def _time_s(row: dict[str, Any], where: str) -> float | None:
    """When a request was made, in seconds since 1970; None: the row does not say, or in an unknown form."""
    places = [part for part in (row, row.get("request"), row.get("response")) if isinstance(part, dict)]
    value = next((place[name] for place in places for name in _TIMES if place.get(name) is not None), None)
    if value is None:
        return None
    if isinstance(value, int | float):
        return value / 1e3 if value >= _MS_FROM else float(value)
    try:
        return timestamp_s(value, where)
    except UserError:
        return None


def _logged_calls(row: dict[str, Any], where: str) -> list[ChatCall]:
    request = as_object(row.get("request") or row, f"{where}: request")
    if "messages" not in request:
        raise UserError(f"{where}: there is no key messages; is this a log of OpenAI messages?")
    messages = [as_object(item, f"{where}: messages") for item in as_list(request["messages"], f"{where}: messages")]
    tools = request.get("tools")
    before = [json.dumps(tools, ensure_ascii=False)] if tools else []
    words = [*before, *map(message_words, messages)]
    system = len(before) + leading_system(messages)
    if (answer := _answer(row, where)) is not None:
        return [ChatCall(tuple(words), answer, system)]
    return list(_answers(messages, words, len(before), system))


def _answers(messages: Sequence[dict[str, Any]], words: Sequence[str], first: int, system: int) -> Iterator[ChatCall]:
    """The calls of a conversation. `first`: the index of its first message in `words`."""
    for index, message in enumerate(messages):
        if message.get("role") == "assistant" and index:
            yield ChatCall(tuple(words[: first + index]), words[first + index], min(system, first + index))


def _answer(row: dict[str, Any], where: str) -> str | None:
    """The words of a request's response; None: the row is a conversation."""
    response = as_object(row.get("response") or row, f"{where}: response")
    choices = as_list(response.get("choices") or [], f"{where}: choices")
    message = as_object(choices[0], f"{where}: choices").get("message") if choices else response.get("message")
    return None if message is None else message_words(as_object(message, f"{where}: message"))


# -- tau-bench results: `[{task_id, trial, traj: [messages]}]`; every assistant message is one round


def load_tau_bench(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session per trajectory. Tool schemas are not in the files, so the prompts lack them."""
    files = source_files(path, ".json")
    for file in files:
        prefix = f"{file_stem(file)}-" if len(files) > 1 else ""
        for index, entry in enumerate(as_list(read_json(file), str(file))):
            where = f"{file}: entry {index}"
            run = as_object(entry, where)
            calls = _turns(as_list(run.get("traj"), f"{where}: traj"), where)
            if not calls:
                options.note(f"{where}: no assistant message, left out")
                continue
            yield Session(
                session_id=f"{prefix}{run.get('task_id', index)}-{run.get('trial', 0)}",
                arrival_s=0.0,
                rounds=rounds_from_chat(calls, options, where),
                shared_prefix=shared_prefix_of(calls[0], options),
            )


def _turns(messages: list[Any], where: str) -> list[ChatCall]:
    calls: list[ChatCall] = []
    before: list[str] = []
    system = leading_system([as_object(message, where) for message in messages])
    for message in messages:
        words = message_words(message)
        if message.get("role") == "assistant" and before:
            calls.append(ChatCall(messages=tuple(before), output=words, system_messages=system))
        before.append(words)
    return calls


# -- ToolBench answers: `answer/*.json`, whose `answer_generation.train_messages` are the model calls of one run


def load_toolbench(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session per file. The prompt of a call is the function schemas and all its messages but the last."""
    for file in source_files(path, ".json"):
        document = read_json(file)
        if path.is_dir() and not (isinstance(document, dict) and "answer_generation" in document):
            options.note(f"{file}: no answer_generation, left out")
            continue
        answer = as_object(as_object(document, str(file)).get("answer_generation"), f"{file}: answer_generation")
        calls = as_list(answer.get("train_messages") or [], f"{file}: train_messages")
        if not calls:
            options.note(f"{file}: no train_messages, left out")
            continue
        schemas = json.dumps(answer.get("function") or [], ensure_ascii=False)
        name = file.name if path.is_file() else str(file.relative_to(path))
        yield Session(
            session_id=name,
            arrival_s=0.0,
            rounds=rounds_from_chat([_answer_call(call, schemas, str(file)) for call in calls], options, str(file)),
        )


def _answer_call(messages: object, schemas: str, where: str) -> ChatCall:
    words = [message_words(as_object(message, where)) for message in as_list(messages, where)]
    return ChatCall(messages=(schemas, *words[:-1]), output=words[-1] if words else "")
