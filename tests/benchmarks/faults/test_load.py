"""How a client judges the end of a round: against a server whose answers are wrong in a chosen way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from ampd.tiny_model import tiny_model_path
from benchmarks.faults.load import Client, Ending, RoundResult
from benchmarks.faults.tokens import ExpectedTokens, expected_tokens

PROMPT = [30, 31, 32]
TOKENS = 6


@pytest.fixture(scope="module")
def expected() -> ExpectedTokens:
    return expected_tokens(tiny_model_path())


def event(text: str, finish_reason: str | None = None) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish_reason}]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


@asynccontextmanager
async def answering(*parts: bytes, length: int | None = None, hangs: bool = False) -> AsyncIterator[str]:
    """A server that answers one request with these bytes, and closes the connection or hangs."""

    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"".join(parts)
        if not body.startswith(b"HTTP/"):
            body = HEAD + f"Content-Length: {length or len(body)}\r\n\r\n".encode() + body
        writer.write(body)
        await writer.drain()
        if hangs:
            await reader.read()
        writer.close()
        await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await done.wait()


async def outcome(expected: ExpectedTokens, *parts: bytes, bound_s: float = 20.0, **options: object) -> RoundResult:
    async with answering(*parts, **options) as url:  # type: ignore[arg-type]
        client = Client(lambda: [url], expected, bound_s)
        try:
            return await client.send("s1", PROMPT, TOKENS)
        finally:
            await client.close()


Parts = Callable[[str], tuple[bytes, ...]]
SERVERS: dict[str, tuple[Parts, Ending]] = {
    "all tokens": (lambda text: (event(text), event("", "length"), DONE), Ending.COMPLETED),
    "a repeated token": (lambda text: (event(text[:5]), event(text[4:]), event("", "length"), DONE), Ending.WRONG),
    "a missing token": (lambda text: (event(text[:-2]), event("", "length"), DONE), Ending.WRONG),
    "a truncated stream that looks complete": (lambda text: (event(text[:5]), DONE), Ending.LOST),
    "nothing": (lambda _: (DONE,), Ending.LOST),
    "an error in the stream": (
        lambda text: (event(text[:5]), b"event: error\n: a worker was lost\n\n"),
        Ending.FAILED,
    ),
    "an error after a wrong token": (
        lambda text: (event("x" + text[:5]), b'event: error\ndata: "a worker was lost"\n\n'),
        Ending.WRONG,
    ),
    "a status with a message": (
        lambda _: (b"HTTP/1.1 503 Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy",),
        Ending.FAILED,
    ),
    "a status without a message": (
        lambda _: (b"HTTP/1.1 500 Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",),
        Ending.LOST,
    ),
}


@pytest.mark.parametrize("server", list(SERVERS))
async def test_each_end_of_a_round_is_judged(expected: ExpectedTokens, server: str) -> None:
    parts, ending = SERVERS[server]
    text = expected.text(PROMPT, TOKENS)
    result = await outcome(expected, *parts(text))
    assert (result.ending, bool(result.detail)) == (ending, ending is not Ending.COMPLETED)


async def test_a_connection_that_breaks_is_a_clear_failure(expected: ExpectedTokens) -> None:
    text = expected.text(PROMPT, TOKENS)
    result = await outcome(expected, event(text[:5]), length=10_000)
    assert result.ending is Ending.FAILED


async def test_a_round_without_an_end_is_lost(expected: ExpectedTokens) -> None:
    text = expected.text(PROMPT, TOKENS)
    result = await outcome(expected, event(text[:5]), length=10_000, hangs=True, bound_s=0.3)
    assert (result.ending, result.detail) == (Ending.LOST, "no end within 0.3 s")


async def test_sessions_whose_last_round_did_not_end_them_are_open(expected: ExpectedTokens) -> None:
    client = Client(list, expected, 20.0)
    ended = RoundResult("ended", 0.0, ending=Ending.COMPLETED, is_final=True)
    client.results += [
        RoundResult("ended", 0.0, ending=Ending.COMPLETED),
        RoundResult("failed", 0.0, ending=Ending.FAILED, is_final=True),
        RoundResult("left", 0.0, ending=Ending.LEFT),
        ended,
    ]
    assert client.open_sessions() == ["failed", "left"]
    await client.close()
