"""Whether a prompt of `/v1/messages` is too long, where Dynamo's frontend answers 500 without a reason.

The frontend refuses such a prompt itself, so no form of `/v1/messages` shows the reason. At `/v1/completions` it tells
the numbers. So the relay asks there with the texts of the same prompt. The request is marked as a question, which no
coordinator serves (`ampd.relay_mark`), so that a prompt which is short enough costs no engine anything. The texts lack
the tokens of the chat template: a prompt that is too long by these alone keeps its 500.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import aiohttp

from ampd.wire import Refused
from router.status_relay.api_paths import MESSAGES
from router.status_relay.second_question import error_message

_UNEXPLAINED = "internal server error"
_TOO_LONG = "maximum context length"
"""What Dynamo says of such a prompt where it says anything."""

_PREFIX = "prompt is too long: "
"""As in Anthropic's API. Agents look for it, and shorten their context."""

_LEVELS = 8
"""More than a text in the result of a tool has above it."""


def may_be_too_long(path: str, status: int, body: bytes) -> bool:
    """Whether an answer that is not streamed is the one that the frontend gives for a prompt that is too long."""
    if path != MESSAGES or status != HTTPStatus.INTERNAL_SERVER_ERROR:
        return False
    return (error_message(body) or "").lower() == _UNEXPLAINED


def as_completion(message: dict[str, Any]) -> dict[str, Any]:
    """The same prompt in a request that never reaches a worker."""
    parts = (message.get("system"), message.get("messages"))
    tools = message.get("tools")
    texts = [text for part in parts for text in _texts(part)] + [_json(tools)] * bool(tools)
    return {"model": message.get("model"), "prompt": "\n".join(texts)}


async def too_long_in_answer(answer: aiohttp.ClientResponse) -> Refused | None:
    """The refusal in the answer to that request; None: the prompt is not too long."""
    if answer.status != HTTPStatus.BAD_REQUEST:
        return None
    reason = error_message(await answer.read()) or ""
    return Refused(answer.status, _PREFIX + reason) if _TOO_LONG in reason else None


def _texts(part: Any, levels: int = _LEVELS) -> Iterator[str]:
    """The texts of messages and of their blocks."""
    if not levels:
        return
    match part:
        case str():
            yield part
        case list():
            for each in part:
                yield from _texts(each, levels - 1)
        case {"text": str(text)}:
            yield text
        case {"type": "tool_use", "input": given}:
            yield _json(given)
        case {"content": content}:
            yield from _texts(content, levels - 1)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
