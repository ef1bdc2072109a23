"""What the first events of a stream say: a refusal, a failure without a reason, or nothing yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

import aiohttp

from ampd.relay_mark import RelayMark
from ampd.wire import Refused, refusal_in, refusal_in_text
from router.status_relay.api_paths import MESSAGES, RESPONSES

_OWN = (
    b"event: response.created",
    b"event: response.in_progress",
    b"event: message_start",
    b"event: content_block_start",
)
"""How events begin that Dynamo's frontend sends in streams of `/v1/responses` and `/v1/messages` before the output."""
_FAILED = {RESPONSES: b"event: response.failed", MESSAGES: b"event: error"}
_DATA = "data:"
_END = b"\n\n"


async def first_events(stream: aiohttp.StreamReader) -> bytes:
    """The stream up to the end of the first event that is not the frontend's own, with what came along behind it."""
    read, event, seen = bytearray(), 0, 0
    async for part in stream.iter_any():
        read += part
        while (end := read.find(_END, seen)) >= 0:
            if not read.startswith(_OWN, event):
                return bytes(read)
            event = seen = end + len(_END)
        seen = max(event, len(read) - 1)  # what has come is not searched again: the first event may be long
    return bytes(read)


def refusal_of(events: bytes, mark: RelayMark) -> Refused | None:
    """The refusal that a coordinator has sent.

    Args:
        mark: of the request.
    """
    lines = events.decode(errors="replace").splitlines()
    if not mark.as_text:
        comments = (line[1:] for line in lines if line.startswith(":"))
        return next((refused for comment in comments if (refused := refusal_in(comment))), None)
    secret = str(mark)
    texts = (text for line in lines if line.startswith(_DATA) and secret in line for text in _texts(line))
    return next((refused for text in texts if (refused := refusal_in_text(text, secret))), None)


def has_failed(path: str, events: bytes) -> bool:
    """Whether the round of a stream of `/v1/responses` or `/v1/messages` failed before any output."""
    failed = _FAILED.get(path)
    return failed is not None and (_deciding(events) or b"").startswith(failed)


def _texts(line: str) -> Iterator[str]:
    """The texts of an event of `/v1/messages`, as output or as thoughts."""
    with suppress(ValueError, RecursionError):
        match json.loads(line.removeprefix(_DATA)):
            case {"delta": {"text": str(text)} | {"thinking": str(text)}}:
                yield text


def _deciding(events: bytes) -> bytes | None:
    """The first whole event that is not the frontend's own."""
    whole = events.split(_END)[:-1]
    return next((event for event in whole if not event.startswith(_OWN)), None)
