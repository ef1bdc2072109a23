"""What the first events of a stream say: a refusal, a failure without a reason, or nothing yet."""

from __future__ import annotations

import aiohttp

from ampd.wire import Refused, refusal_in

_OWN = (b"event: response.created", b"event: response.in_progress")
"""How events begin that Dynamo's frontend sends in streams of `/v1/responses` before it has asked a coordinator."""
_FAILED = b"event: response.failed"
_END = b"\n\n"


async def first_events(stream: aiohttp.StreamReader) -> bytes:
    """The stream up to the end of the first event that is not the frontend's own, with what came along behind it."""
    read = b""
    async for part in stream.iter_any():
        read += part
        if _deciding(read) is not None:
            break
    return read


def refusal_of(events: bytes) -> Refused | None:
    """The refusal that a coordinator has sent as a comment."""
    comments = (line[1:] for line in events.decode(errors="replace").splitlines() if line.startswith(":"))
    return next((refused for comment in comments if (refused := refusal_in(comment))), None)


def has_failed(events: bytes) -> bool:
    """Whether the round of a stream of `/v1/responses` failed before any output."""
    return (_deciding(events) or b"").startswith(_FAILED)


def _deciding(events: bytes) -> bytes | None:
    """The first whole event that is not the frontend's own."""
    whole = events.split(_END)[:-1]
    return next((event for event in whole if not event.startswith(_OWN)), None)
