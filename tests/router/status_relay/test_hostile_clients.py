"""Clients of the relay that send odd bytes, or do not read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from router.status_relay.relay import Relay
from tests.router.status_relay.serving import connected, serving
from tests.router.status_relay.test_relay import Frontend

END = b"Host: a\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Frontend, str]]:
    """A frontend, and the relay's URL."""
    frontend = Frontend()
    async with serving(frontend.runner()) as behind, serving(Relay(behind).runner()) as url:
        yield frontend, url


async def answers(url: str, *requests: bytes) -> bytes:
    """What a server sends on one connection; the last request lets it close."""
    reader, writer = await connected(url)
    for request in requests:
        writer.write(request)
    received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize(
    ("value", "is_served"), [(b"caf\xc3\xa9", True), (b"acme\xe9", False), (b"acme\xed\xa0\x80", False)]
)
async def test_a_header_that_is_not_utf_8_is_refused_and_not_shortened(value: bytes, is_served: bool) -> None:
    async with relayed() as (frontend, url):
        answer = await answers(url, b"GET /whole HTTP/1.1\r\nx-tenant-id: " + value + b"\r\n" + END)
        assert answer.startswith(b"HTTP/1.1 200" if is_served else b"HTTP/1.1 400")
        assert [asked["x-tenant-id"].encode() for _, _, asked, _ in frontend.asked] == ([value] if is_served else [])
        assert is_served or b"x-tenant-id is not UTF-8" in answer


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Transfer-Encoding: identity\r\nContent-Length: 5",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 5",
        b"Content-Length: 0\r\nContent-Length: 5",
        b"Content-Length: +5",
        b"Content-Length: 0\r\n Content-Length: 5",
    ],
)
async def test_a_body_that_may_end_at_two_places_reaches_no_frontend(framing: bytes) -> None:
    async with relayed() as (frontend, url):
        hidden = b"0\r\n\r\nGET /whole/hidden HTTP/1.1\r\n" + END
        answer = await answers(url, b"POST /whole HTTP/1.1\r\nHost: a\r\n" + framing + b"\r\n\r\n" + hidden)
        assert answer.split()[1] == b"400"
        assert answer.count(b"HTTP/1.") == 1
        assert frontend.asked == []


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


async def test_a_client_that_offers_http_2_is_served_without_it() -> None:
    async with relayed() as (frontend, url):
        first = b"POST /whole HTTP/1.1\r\nHost: a\r\n" + OFFER + b"Content-Length: 2\r\n\r\n{}"
        reader, writer = await connected(url)
        for request in (first, b"GET /whole HTTP/1.1\r\n" + END):
            writer.write(request)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readuntil(b"}")
        writer.close()
        assert [(method, body) for method, _, _, body in frontend.asked] == [("POST", b"{}"), ("GET", b"")]
        assert "upgrade" not in {name.lower() for name in frontend.asked[0][2]}


async def test_requests_in_one_packet_are_answered_in_turn() -> None:
    async with relayed() as (_, url):
        first = b"POST /stream HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        answer = await answers(url, first + b"HEAD /whole HTTP/1.1\r\n" + END)
        assert [line.split()[1] for line in answer.splitlines() if line.startswith(b"HTTP/1.1")] == [b"200"] * 2
        assert answer.index(b"[DONE]") < answer.rindex(b"HTTP/1.1")
        assert answer.endswith(b"\r\n\r\n"), "HEAD has no body"


async def test_a_connection_serves_on_after_an_error() -> None:
    async with relayed() as (frontend, url):
        wrong = b"GET /whole HTTP/1.1\r\nHost: a\r\nx-a: \xe9\r\n\r\n"
        answer = await answers(url, wrong, b"GET /whole HTTP/1.1\r\n" + END)
        assert answer.index(b"HTTP/1.1 400") < answer.index(b"HTTP/1.1 200")
        assert len(frontend.asked) == 1


@pytest.mark.parametrize("sends_body", [False, True])
async def test_a_client_that_expects_100_gets_it(sends_body: bool) -> None:
    async with relayed() as (frontend, url):
        reader, writer = await connected(url)
        writer.write(b"POST /whole HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n" + END)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        if sends_body:
            writer.write(b"{}")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert [body for _, _, _, body in frontend.asked] == ([b"{}"] if sends_body else [])
        assert "expect" not in {name.lower() for _, _, asked, _ in frontend.asked for name in asked}


class _Flood:
    """A frontend that sends a long stream as fast as the relay takes it."""

    PARTS, PART = 512, b"data: " + b"x" * (1 << 18) + b"\n\n"

    def __init__(self) -> None:
        self.sent = 0
        self.is_blocked = asyncio.Event()

    def runner(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/stream", self._stream)
        return web.AppRunner(app)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(self.PARTS):
            try:
                async with asyncio.timeout(1):  # far longer than it takes where somebody reads
                    await asyncio.shield(writing := asyncio.ensure_future(response.write(self.PART)))
            except TimeoutError:
                self.is_blocked.set()
                await writing
            self.sent += 1
        return response


async def test_a_client_that_does_not_read_stops_the_frontend_and_not_the_memory() -> None:
    flood = _Flood()
    async with (
        serving(flood.runner()) as behind,
        serving(Relay(behind).runner()) as url,
        aiohttp.ClientSession(url, read_bufsize=1 << 14) as client,
        client.post("/stream") as answer,
    ):
        async with asyncio.timeout(30):
            await flood.is_blocked.wait()
        assert flood.sent < flood.PARTS // 4  # the rest waits in the frontend
        assert len(await answer.content.read()) == flood.PARTS * len(flood.PART)
