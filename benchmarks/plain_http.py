"""A client of HTTP that takes a tenth of the time of a general one: a connection for each request."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """An answer of HTTP. `retry_after_s`: of its header."""

    status: int
    text: bytes
    retry_after_s: float | None


async def request(
    host: str, port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Answer:
    """One request over a connection of its own."""
    lines = [f"{method} {path} HTTP/1.0", f"Host: {host}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 26)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return answer_of(await reader.read(-1))
    finally:
        writer.close()


def answer_of(received: bytes) -> Answer:
    """What a server has sent until it closed the connection."""
    head, _, text = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    seconds = headers.get("retry-after")
    return Answer(int(first.split(None, 2)[1]), text, None if seconds is None else float(seconds))


def chat_of(answer: Answer) -> dict[str, Any] | None:
    """The chat of an answer, put together if it is a stream; None: the stream has an error, or no end."""
    if not answer.text.startswith((b"data:", b":", b"event:")):
        reply: dict[str, Any] = json.loads(answer.text)
        return reply
    events = [
        line.removeprefix("data:").strip() for line in answer.text.decode().splitlines() if line.startswith("data:")
    ]
    *chunks, end = events
    if end != "[DONE]":
        return None
    found = [json.loads(chunk) for chunk in chunks]
    if any("error" in chunk for chunk in found):
        return None
    text = "".join(choice["delta"].get("content") or "" for chunk in found for choice in chunk.get("choices", ()))
    extra = next((chunk["nvext"] for chunk in reversed(found) if (chunk.get("nvext") or {}).get("engine_data")), None)
    return extra and {"choices": [{"message": {"content": text}}], "nvext": extra}
