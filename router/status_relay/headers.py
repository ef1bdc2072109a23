"""The headers of requests and answers that the relay passes on."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

_OF_ONE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "expect")
)
"""Headers that describe one connection, or that each side makes anew.

Others that `Connection` names go through, because a client could take away headers that a gateway has set."""

MADE_BY_AIOHTTP = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
"""Headers that the library would add where the client sent none."""

MOST_HEADER_BYTES = 64 << 10
"""Of one header, and of the path. The library's 8 KB are too few for some tokens.
`connection_guard` has their total."""

MOST_HEADERS = 100
"""As many as the frontend takes."""


_SESSION = "x-dynamo-session-id"

_NAMES = (("x-claude-code-session-id", "x-claude-code-agent-id"), ("session-id", "thread-id"))
"""Headers that name a session, and those of its parts, which count in this order."""


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without those of one connection."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION)


def forwarded(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy of a request's headers, with the name of its session for Dynamo."""
    copy = passed_on(headers)
    if not _named(headers, _SESSION) and (name := _session_of(headers)):
        copy[_SESSION] = name
    return copy


def _session_of(headers: CIMultiDictProxy[str]) -> str:
    """The session that a client's own headers name; empty: they name none, or Dynamo finds it itself.

    An agent and its sub-agents share a session's id. Each has a context of its own. Dynamo knows no `session-id`, and
    takes the id of an agent, which is not unique, for that of its session.
    """
    named = ((_named(headers, session), _named(headers, part)) for session, part in _NAMES)
    return next((f"{session}/{part}" if part else session for session, part in named if session), "")


def _named(headers: CIMultiDictProxy[str], name: str) -> str:
    """The value of a header as Dynamo reads it: of several the first one, and empty if it is not ASCII."""
    value = headers.get(name, "")
    return value.strip() if value.isascii() else ""


def unknown_coding(headers: CIMultiDictProxy[str]) -> str | None:
    """A coding of the body other than `chunked`, which the library would not pass on; None: there is none."""
    codings = [each.strip() for value in headers.getall("transfer-encoding", ()) for each in value.split(",")]
    return next((each for each in codings if each.lower() not in ("", "chunked")), None)


def unreadable(headers: CIMultiDictProxy[str]) -> str | None:
    """The name of a header that is not UTF-8; None: all are.

    The library would leave such bytes out of what it sends. The header of one tenant could become that of another.
    """
    return next((name for name, value in headers.items() if not _is_utf_8(value)), None)


def _is_utf_8(value: str) -> bool:
    """Whether a value was UTF-8. The library reads each wrong byte as half a character."""
    return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)
