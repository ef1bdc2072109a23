"""The paths of the APIs, and errors in the form of the API whose path a client has asked."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from ampd.wire import retry_after_s

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
SERVING_PATHS = (CHATS, COMPLETIONS, "/v1/embeddings", RESPONSES, MESSAGES)

_INVALID = "invalid_request_error"
_TYPES = {
    400: _INVALID,
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""As in the APIs of OpenAI and Anthropic."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The HTTP status and the message of a request that the relay answers itself."""

    status: int
    message: str


def error_response(path: str, refused: Refused) -> web.Response:
    """The answer to a request that is refused."""
    response = web.json_response(_body(path, refused), status=refused.status)
    if (seconds := retry_after_s(refused.message)) is not None:
        response.headers["Retry-After"] = str(seconds)
    return response


def last_answer(path: str, refused: Refused) -> bytes:
    """The same answer as bytes. Its connection ends with it."""
    body = json.dumps(_body(path, refused)).encode()
    seconds = retry_after_s(refused.message)
    lines = (
        f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(() if seconds is None else (f"Retry-After: {seconds}",)),
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _body(path: str, refused: Refused) -> dict[str, object]:
    """As of Anthropic's API, or the fields of Dynamo's own errors with OpenAI's part `error`."""
    is_ours = refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _TYPES.get(refused.status, "server_error" if is_ours else _INVALID)
    if path == MESSAGES:
        kind = "api_error" if kind == "server_error" else kind
        return {"type": "error", "error": {"type": kind, "message": refused.message}}
    body: dict[str, object] = {"message": refused.message, "type": kind, "code": refused.status}
    return {**body, "error": body}


def error_message(body: bytes) -> str | None:
    """The message in the body of an error, in the form of either API."""
    with suppress(ValueError, RecursionError):
        match json.loads(body):
            case {"message": str(message)} | {"error": {"message": str(message)}}:
                return message
    return None
