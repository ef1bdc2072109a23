"""Why a round was refused, where Dynamo's frontend shows neither status nor reason.

A completion that is not streamed gets the status 500, a stream of `/v1/responses` an event that it failed, and
`/v1/messages` without a stream the status alone. The same request in the other form, as a stream or not, shows the
reason. A stream of `/v1/messages` shows it only as text, which a coordinator sends where the relay wants it so. So the
relay asks a second time, with a mark by which no coordinator serves the request (`ampd.relay_mark`). They remember what
they have answered, and tell each other what only a worker could find. If a coordinator knows no reason any more, it
answers 429, because a place has become free meanwhile. So a question costs no engine anything, whatever the reason was.
The frontend tokenizes the prompt again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web

from ampd.relay_mark import RelayMark
from ampd.wire import Refused
from router.status_relay.first_events import first_events, refusal_of

PATIENCE_S = 5.0
"""How long the second answer may take."""

MOST_BYTES = 64 << 20
"""A longer body is not kept, so that its request cannot be asked again."""

MESSAGES = "/v1/messages"
_PATHS = ("/v1/completions", "/v1/responses", MESSAGES)
_UNEXPLAINED = b"Failed to fold completions stream"


_BAD_REQUEST, _OVERLOADED, _UNAVAILABLE = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


class KeptBody:
    """The body of a request on its way to the frontend, which is kept until no second question can come."""

    def __init__(self, request: web.Request) -> None:
        self._content = request.content
        self._is_messages = request.path == MESSAGES
        self._parts: list[bytes] = []
        self._bytes = 0
        self._is_kept = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._content.iter_any():
            self._bytes += len(part)
            if self._bytes > MOST_BYTES:
                self.drop()
            if self._is_kept:
                self._parts.append(part)
            yield part

    def drop(self) -> None:
        """Keep it no longer: the answer has begun, and lasts as long as the round."""
        self._is_kept = False
        self._parts.clear()

    def read(self) -> dict[str, Any] | None:
        """The request; None: it was not kept, or is no object."""
        with suppress(ValueError, RecursionError):
            value = json.loads(b"".join(self._parts))
            if isinstance(value, dict):
                return value
        return None

    def asked_again(self) -> dict[str, Any] | None:
        """The request in the form that shows the reason; None: as in `read`."""
        value = self.read()
        return None if value is None else {**value, "stream": self._is_messages or not value.get("stream")}


def mark_of_second(path: str, mark: RelayMark) -> RelayMark:
    """The mark of a second question. Its secret tells a refusal that comes as text from the text of a model."""
    return mark.question(as_text=path == MESSAGES)


def kept_body(request: web.Request) -> KeptBody | None:
    """The body of a request whose answer may lack a reason; None: of all others, and of an encoded one."""
    may_lack = request.path in _PATHS and request.method == "POST" and "content-encoding" not in request.headers
    return KeptBody(request) if may_lack and request.body_exists else None


def is_unexplained(path: str, status: int, body: bytes) -> bool:
    """Whether an answer that is not streamed is an error without a reason."""
    if path == MESSAGES:
        refused = _refused(status, body) if status in (_BAD_REQUEST, _OVERLOADED, _UNAVAILABLE) else None
        return refused is not None and refused.message == HTTPStatus(status).phrase
    return status == HTTPStatus.INTERNAL_SERVER_ERROR and _UNEXPLAINED in body


async def refusal_in_answer(
    asked: AbstractAsyncContextManager[aiohttp.ClientResponse], mark: RelayMark
) -> Refused | None:
    """The refusal in the answer to a second question; None: there is none.

    Args:
        mark: of the request.
    """
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(PATIENCE_S), asked as answer:
            if answer.content_type == "text/event-stream":
                return refusal_of(await first_events(answer.content), mark)
            if answer.status >= HTTPStatus.BAD_REQUEST:
                return _refused(answer.status, await answer.read())
    return None


def error_message(body: bytes) -> str | None:
    """The message in the body of an error, in the form of either API."""
    with suppress(ValueError, RecursionError):
        match json.loads(body):
            case {"message": str(message)} | {"error": {"message": str(message)}}:
                return message
    return None


def _refused(status: int, body: bytes) -> Refused | None:
    message = error_message(body)
    return None if message is None else Refused(status, message)
