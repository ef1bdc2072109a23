"""OpenAI message logs as JSON lines: whole conversations, or requests with their responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.loader import LoadOptions, register
from workloads.formats.messages import ChatCall, leading_system, message_words, rounds_from_chat, shared_prefix_of
from workloads.formats.source import Row, as_list, as_object, read_json_lines, source_files
from workloads.trace import Session

_NAMES = ("session_id", "conversation_id", "thread_id")


@register("openai-messages", "OpenAI messages as JSON lines (conversations, or requests; no times: every gap is 0)")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session per conversation, and one per session id of logged requests.

    A row is a conversation, whose assistant messages were a model call each, or one request with its response:
    `{"messages": [...]}`, `{"messages": [...], "choices": [...]}` or `{"request": {...}, "response": {...}}`. Rows with
    the same `session_id`, `conversation_id` or `thread_id` are one session. `tools` are a part of the prompt.
    """
    by_session: dict[str, list[Row]] = {}
    for file in source_files(path, ".jsonl", ".json"):
        for where, row in read_json_lines(file):
            by_session.setdefault(_name_of(row, where), []).append((where, row))
    for name, rows in by_session.items():
        calls = [call for where, row in rows for call in _calls(row, where)]
        if calls:
            yield Session(
                session_id=name,
                arrival_s=0.0,
                rounds=rounds_from_chat(calls, options, rows[0][0]),
                shared_prefix=shared_prefix_of(calls[0], options),
            )
        else:
            options.note(f"{rows[0][0]}: no answer of a model, left out")


def _name_of(row: dict[str, Any], where: str) -> str:
    metadata = row.get("metadata")
    places = (row, metadata if isinstance(metadata, dict) else {})
    found = (place.get(name) for place in places for name in _NAMES)
    return str(next((name for name in found if name), Path(where).name))


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
