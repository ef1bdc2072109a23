"""Scripted replies of the modelled engine, with which an agent's loop is rehearsed without a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.session_key import session_key

_KEYS = {"role", "session", "text", "content", "reasoning_content", "tool_calls"}
_CALL_ID = "call00000"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name and arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One line of the file.

    Attributes:
        text: the output word by word; None: the chat template makes it from `message`.
        message: the assistant's message in the form of OpenAI.
        calls: the tool calls in it.
    """

    text: str | None
    message: Mapping[str, Any]
    calls: tuple[ToolCall, ...] = ()


class Replies:
    """The replies of a file, by session and turn.

    Args:
        by_session: the lines that name a session, by the client's id of it; "": the lines for all other sessions.
    """

    def __init__(self, by_session: Mapping[str, Sequence[Reply]]) -> None:
        self._by_session = by_session

    @classmethod
    def read(cls, path: Path) -> Replies:
        """Read a file of JSON lines; docs/workers.md describes them.

        Raises:
            UserError: it cannot be read, or a line is wrong.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"--replies: {path} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise UserError(f"--replies: {path} is not UTF-8 text") from None
        by_session: dict[str, list[Reply]] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip():
                session, reply = _parsed(line, f"--replies: {path}:{number}")
                by_session.setdefault(session, []).append(reply)
        if not by_session:
            raise UserError(f'--replies: {path} has no reply; a line is {{"content": "..."}}')
        return cls(by_session)

    @property
    def all(self) -> list[Reply]:
        return [reply for replies in self._by_session.values() for reply in replies]

    def find(self, tenant: str, session: str, turn: int) -> Reply | None:
        """The reply of a turn; None: the script has ended.

        Args:
            session: its name inside of the graph, see `ampd.session_key`.
            turn: the number of the assistant's messages in the prompt.
        """
        own = (name for name in self._by_session if name and session_key(tenant, name) == session)
        replies = self._by_session.get(next(own, ""), ())
        return replies[turn] if turn < len(replies) else None


def _parsed(line: str, where: str) -> tuple[str, Reply]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f'{where}: a line must be an object such as {{"content": "..."}}')
    if unknown := sorted(fields.keys() - _KEYS):
        raise UserError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    session, text = fields.pop("session", ""), fields.pop("text", None)
    if not isinstance(session, str) or not isinstance(text, str | None):
        raise UserError(f"{where}: session and text must be text")
    if (text is None) == (not fields.keys() & {"content", "tool_calls"}):
        raise UserError(f"{where}: give either text, or content and tool_calls")
    if text is not None:
        return session, Reply(text, {})
    asked = fields.get("tool_calls") or []
    if not isinstance(asked, list):
        raise UserError(f"{where}: tool_calls must be a list")
    calls = tuple(_call(call, where) for call in asked)
    message: dict[str, Any] = {"content": fields.get("content") or ""}
    if thoughts := fields.get("reasoning_content"):
        message["reasoning_content"] = thoughts
    if not all(isinstance(part, str) for part in message.values()):
        raise UserError(f"{where}: content and reasoning_content must be text")
    if calls:
        message["tool_calls"] = [
            {"id": _CALL_ID, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return session, Reply(None, message, calls)


def _call(call: Any, where: str) -> ToolCall:
    """A call as `{"name": ..., "arguments": {...}}`, or as OpenAI writes it."""
    try:
        function = call.get("function") or call
        name, arguments = function["name"], function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: a tool call must have a name and arguments ({error!r})") from None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise UserError(f"{where}: the name of a tool must be text, and its arguments an object")
    return ToolCall(name, arguments)
