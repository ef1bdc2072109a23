"""OpenAI message logs as JSON lines: whole conversations, or requests with their responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.loader import LoadOptions, register
from workloads.formats.messages import ChatCall, leading_system, message_words, rounds_from_chat, shared_prefix_of
from workloads.formats.source import as_list, as_object, read_json_lines, source_files, timestamp_s
from workloads.trace import Session

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


@register("openai-messages", "OpenAI messages as JSON lines (conversations, or requests)")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
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
            calls, name, at_s = _calls(row, where), _name_of(row), _time_s(row, where)
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


def _calls(row: dict[str, Any], where: str) -> list[ChatCall]:
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
