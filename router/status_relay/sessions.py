"""What a request's head and body say of its session: its name, and a line that would hide its prefix.

`SOURCES` is the table of the names that agent programs give their sessions. docs/coordinator.md has it for users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from multidict import CIMultiDictProxy

from ampd.errors import UserError
from ampd.keys import MAX_SESSION_ID_CHARS, SESSION_HEADER, ascii_name

BODY = "body:"
"""Before the keys of a value in the body, which dots separate. Other names are those of headers."""

_FREE = "*"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a client writes the name of its session.

    Attributes:
        session: a header, with `*` for any part of its name, or `body:` with keys.
        part: the same of the agent or the thread within the session; it names nothing alone. "": there is none.
        within: finds the name in the value; None: the value is the name.
    """

    session: str
    part: str = ""
    within: re.Pattern[str] | None = None


SOURCES = (
    Source(SESSION_HEADER),
    Source("x-claude-code-session-id", "x-claude-code-agent-id"),
    Source("session-id", "thread-id"),
    Source("thread-id"),
    Source("session_id"),
    Source("conversation_id"),
    Source("x-session-id"),
    Source("x-session-affinity"),
    Source("x-litellm-session-id"),
    Source("*-session-id"),
    Source("x-opencode-session"),
    Source("x-conversation-id"),
    Source("x-*-chat-id"),
    Source("x-task-id"),
    Source("x-kilocode-taskid"),
    Source("body:session_id"),
    Source("body:litellm_session_id"),
    Source("body:metadata.session_id"),
    Source("body:metadata.sessionId"),
    Source("body:metadata.thread_id"),
    Source("body:metadata.user_id", within=re.compile(r'(?:_session_|"session_id": *")([\w-]+)')),
    Source("body:prompt_cache_key"),
)
"""They count in this order. A value that many conversations share (`user`, `metadata.user_id`) is no name."""


_NAME = re.compile(r"[\w*-]+|body:[^.]+(?:\.[^.]+)*", re.ASCII)


def chosen_sources(names: str, prog: str) -> tuple[Source, ...]:
    """The sources of a graph with further ones, which count before the others except Dynamo's own header.

    Args:
        names: separated by commas; `SESSION+PART` has the part of a session too.
        prog: the command with the flag `--session-names`, for the error.

    Raises:
        UserError: a name is none of a header or of keys.
    """
    own = []
    for each in filter(None, map(str.strip, names.split(","))):
        session, plus, part = each.partition("+")
        for name in (session, part) if plus else (session,):
            if not _NAME.fullmatch(name):
                raise UserError(
                    f"{prog}: --session-names: {name!r} is no name; give headers or body:KEY.KEY, separated by commas, "
                    "as in x-my-run+x-my-agent,body:metadata.run"
                )
        own.append(Source(_lower(session), _lower(part)))
    return (SOURCES[0], *own, *SOURCES[1:])


def _lower(name: str) -> str:
    return name if name.startswith(BODY) else name.lower()


class SessionNames:
    """Finds the session of a request."""

    def __init__(self, sources: Sequence[Source] = SOURCES) -> None:
        self._sources = sources
        paths = [name for source in sources for name in (source.session, source.part) if name.startswith(BODY)]
        keys = sorted({_keys(path)[0] for path in paths})
        fields = [(f"f{number}", Any, None) for number in range(len(keys))]
        renamed = {f"f{number}": key for number, key in enumerate(keys)}
        self._fields = {key: name for name, key in renamed.items()}
        self._body: Any = msgspec.json.Decoder(msgspec.defstruct("_Body", fields, rename=renamed))

    def of(self, headers: CIMultiDictProxy[str], body: bytes = b"") -> str:
        """The name that a request gives its session, in ASCII as headers need it; "": it gives none."""
        read: Any = None

        def value(name: str) -> str:
            nonlocal read
            if not name.startswith(BODY):
                return next(_values(headers, name), "") if name else ""
            if read is None:
                read = self._read(body)
            return self._in_body(read, name)

        for source in self._sources:
            session = value(source.session)
            if source.within is not None:
                session = found[1] if (found := source.within.search(session)) else ""
            if session:
                part = value(source.part)
                return ascii_name(f"{session}/{part}" if part else session)
        return ""

    def _read(self, body: bytes) -> Any:
        """The parts of a body that may have names. The rest is skipped and not checked."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._body.decode(body)
        return ()

    def _in_body(self, read: Any, path: str) -> str:
        first, *rest = _keys(path)
        value = getattr(read, self._fields[first], None)
        for key in rest:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value.strip() if isinstance(value, str) and len(value) <= MAX_SESSION_ID_CHARS else ""


def _keys(path: str) -> list[str]:
    return path.removeprefix(BODY).split(".")


@cache
def _form(name: str) -> re.Pattern[str]:
    """The headers that a name with a free part stands for."""
    return re.compile(re.escape(name).replace(re.escape(_FREE), "[a-z0-9-]+"))


def _values(headers: CIMultiDictProxy[str], name: str) -> Iterator[str]:
    """The values of a header that are not empty: of one header only the first value counts, as for Dynamo."""
    names = [name]
    if _FREE in name:
        names = [each for each in map(str.lower, headers) if _form(name).fullmatch(each) and "parent" not in each]
    for each in names:
        if value := headers.get(each, "").strip():
            yield value


# -- a line that Claude Code puts before its prompt, with another value in each request
#
# Dynamo leaves it out where it is the first text of `system` at /v1/messages. It stays where the client, or a gateway
# that converts its requests, puts it elsewhere.

_MARK = b"x-anthropic-billing-header:"
_LINE = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_OF_SYSTEM = ("system", "developer")


def without_changing_line(body: bytes) -> bytes:
    """A body without that line in what the system says; the same object if it is not there."""
    if _MARK not in body:
        return body
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        read = msgspec.json.decode(body)
        if isinstance(read, dict) and (changed := _without_line(read)) != read:
            return msgspec.json.encode(changed)
    return body


def _without_line(body: dict[str, Any]) -> dict[str, Any]:
    changed = dict(body)
    for key in ("system", "instructions"):
        if key in body:
            changed[key] = _stripped(body[key])
    for key in ("messages", "input"):
        if isinstance(messages := body.get(key), list):
            changed[key] = [_message(message, is_first=not at) for at, message in enumerate(messages)]
    return changed


def _message(message: Any, *, is_first: bool) -> Any:
    """A message of the system, or the first one, which some converters give the system's texts."""
    if isinstance(message, dict) and (is_first or message.get("role") in _OF_SYSTEM) and "content" in message:
        return {**message, "content": _stripped(message["content"])}
    return message


def _stripped(content: Any) -> Any:
    """A text, or a list of parts with texts. A part of which nothing is left goes."""
    if isinstance(content, str):
        return _LINE.sub("", content)
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        left = _LINE.sub("", text) if isinstance(text, str) else text
        if left == text:
            parts.append(part)
        elif left:
            parts.append({**part, "text": left})
    return parts
