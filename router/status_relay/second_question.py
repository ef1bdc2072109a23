"""Why a round was refused, where Dynamo's frontend shows neither status nor reason.

A completion that is not streamed gets the status 500, and so does a chat whose round fails within its output. A stream
of `/v1/responses` gets an event that it failed, and `/v1/messages` without a stream the status alone. The same request
in the other form, as a stream or not, shows the reason. A stream of `/v1/messages` shows it only as text, which a
coordinator sends where the relay wants it so. So the relay asks a second time, with a mark by which no coordinator
serves the request (`ampd.relay_mark`). They remember what they have answered, and tell each other what only a worker
could find. If a coordinator knows no reason any more, it answers 429, because a place has become free meanwhile. So a
question costs no engine anything, whatever the reason was. The frontend tokenizes the prompt again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import aiohttp

from ampd.relay_mark import RelayMark
from ampd.wire import Refused
from router.status_relay.api_paths import CHATS, COMPLETIONS, MESSAGES
from router.status_relay.first_events import first_events, refusal_of

PATIENCE_S = 5.0
"""How long a second answer may take, the wait for the turn to ask included."""

_UNEXPLAINED = {
    CHATS: b"Failed to parse chat completion response",
    COMPLETIONS: b"Failed to fold completions stream",
}
_BAD_REQUEST, _OVERLOADED, _UNAVAILABLE = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)


def mark_of_second(path: str, mark: RelayMark) -> RelayMark:
    """The mark of a second question. Its secret tells a refusal that comes as text from the text of a model."""
    return mark.question(as_text=path == MESSAGES)


def other_form(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """The request in the form that shows the reason."""
    return {**request, "stream": path == MESSAGES or not request.get("stream")}


def is_unexplained(path: str, status: int, body: bytes) -> bool:
    """Whether an answer that is not streamed is an error without a reason."""
    if path == MESSAGES:
        refused = _refused(status, body) if status in (_BAD_REQUEST, _OVERLOADED, _UNAVAILABLE) else None
        return refused is not None and refused.message == HTTPStatus(status).phrase
    text = _UNEXPLAINED.get(path)
    return status == HTTPStatus.INTERNAL_SERVER_ERROR and text is not None and text in body


async def refusal_in_answer(answer: aiohttp.ClientResponse, mark: RelayMark) -> Refused | None:
    """The refusal in the answer to a second question; None: there is none.

    Args:
        mark: of the request.
    """
    if answer.content_type == "text/event-stream":
        return refusal_of(await first_events(answer.content), mark)
    return _refused(answer.status, await answer.read()) if answer.status >= HTTPStatus.BAD_REQUEST else None


def is_reason(path: str, refused: Refused) -> bool:
    """Whether the refusal in a second answer can be why the first one failed.

    A chat without a reason had begun its output, and no overload ends such a round. So 429 says that no coordinator
    knows a reason: Dynamo itself could not read the output.
    """
    return path != CHATS or refused.status != _OVERLOADED


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
