"""One streamed completion over a connection of its own, with its times, or why the graph did not serve it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import httpx

from ampd.errors import RunError

_FIRST = b"\ndata: "
_MESSAGE = re.compile(r'"message":\s*("(?:[^"\\]|\\.)*")')


async def timed_stream(url: str, body: Mapping[str, Any], headers: str) -> tuple[float, float]:
    """Seconds to the first token and to the end of a stream.

    Args:
        url: of the graph.
        body: of a request for a streamed completion.
        headers: lines of further headers, each with its end.

    Raises:
        RunError: the graph refused the request, or its answer broke off. The message has the status and the reason.
    """
    parts, payload = httpx.URL(url), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.host}\r\n{headers}"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    start_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    try:
        writer.write(head.encode() + payload)
        try:
            begun = await reader.readuntil(_FIRST)
        except asyncio.IncompleteReadError as error:
            raise RunError(_why(url, error.partial)) from None
        first_s = time.perf_counter()
        rest = await reader.read()
    finally:
        writer.close()
    if not begun.startswith(b"HTTP/1.1 200") or b"[DONE]" not in rest or b'"error"' in rest:
        raise RunError(_why(url, begun + rest))
    return first_s - start_s, time.perf_counter() - start_s


def _why(url: str, answer: bytes) -> str:
    """The status and the reason in an answer that is no whole stream."""
    text = answer.decode(errors="replace")
    status, _, rest = text.partition("\r\n")
    found = _MESSAGE.search(rest)
    reason = json.loads(found[1]) if found else repr(rest[-300:])
    return f"{url} did not serve a request: {status or 'no answer'}: {reason}"
