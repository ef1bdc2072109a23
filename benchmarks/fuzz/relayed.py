"""What the status relay gets: answers of a frontend, cut at any byte, and requests of clients.

The relay is real. The frontend and the client are sockets, so that any bytes can be sent.
"""

from __future__ import annotations

import asyncio
import json
import random
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from ampd.wire import retry_after_s, with_retry_after
from benchmarks.fuzz.http_answers import pieces
from benchmarks.fuzz.mutations import changed_bytes, changed_json
from benchmarks.fuzz.target import Target
from router.status_relay.relay import Relay

_LOOPBACK = "127.0.0.1"
_REFUSED = {"message": with_retry_after("the queue is full", 3), "code": 429}
_EVENT = {"choices": [{"index": 0, "delta": {"content": "Rome"}}]}
_TAIL = b"".join(b"data: %s\n\n" % json.dumps(_EVENT).encode() for _ in range(3)) + b"data: [DONE]\n\n"
_REQUESTS = (
    b"POST /v1/chat/completions?a=%2Fb HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nx-session-id: 0\r\n\r\n{}",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close, x-tenant-id\r\nx-tenant-id: acme\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}\r\n"
    + 35 * b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
)
_TARGETS = ("*", "http://example.com/x", "@example.com/", ":1/", "//example.com/", "/%zz", "/\u00e9", "/ x", "/a#b?c")
_STATUSES = (b"200", b"400", b"404", b"405", b"413", b"417", b"431", b"501", b"503")
"""Of answers to changed requests."""
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the frontend sends before it closes its connection.

    Attributes:
        body: what the client would read of it without the relay.
        is_whole: it is an answer to its end.
        status: of its head.
    """

    parts: list[bytes]
    body: bytes
    is_whole: bool
    status: int


class FuzzedRelay:
    """A relay, the frontend that it asks, and the event loop of both."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._parts: list[bytes] = [_OK]
        self._asked: list[URL] = []
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._frontend = await asyncio.start_server(self._serve, _LOOPBACK, 0)
        port = self._frontend.sockets[0].getsockname()[1]
        self._upstream = f"{_LOOPBACK}:{port}"
        relay = Relay(f"http://{self._upstream}")
        self._runner = relay.runner()
        await self._runner.setup()
        assert relay._session is not None
        ask = relay._session.request

        def noted(method: str, url: URL, **options: Any) -> Any:
            self._asked.append(url)
            return ask(method, url, **options)

        relay._session.request = noted  # type: ignore[method-assign, assignment]
        site = web.TCPSite(self._runner, _LOOPBACK, 0)
        await site.start()
        self._port: int = self._runner.addresses[0][1]

    def close(self) -> None:
        """Stop both."""
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        await self._runner.cleanup()
        self._frontend.close()
        await self._frontend.wait_closed()

    def targets(self) -> Iterator[Target]:
        """The relay's two sides."""
        yield Target("answer through the relay", _answer, self._relay, ())
        yield Target("request to the relay", _request, self._ask, ())

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer one request."""
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in self._parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    # -- answers

    def _relay(self, answer: _Answer) -> None:
        self._parts = answer.parts
        self._loop.run_until_complete(self._read(answer))

    async def _read(self, answer: _Answer) -> None:
        """A client reads through the relay: what was sent, or an error. What breaks off never looks complete."""
        read, is_whole = b"", True
        async with aiohttp.ClientSession(auto_decompress=False) as session, session.get(self._url) as got:
            try:
                async for part in got.content.iter_any():
                    read += part
            except aiohttp.ClientError:
                is_whole = False
        if got.status == answer.status:
            assert answer.body.startswith(read)
            assert not is_whole or (answer.is_whole and read == answer.body)
            assert not answer.is_whole or is_whole
            seconds = retry_after_s(read.decode(errors="replace")) if answer.status != HTTPStatus.OK else None
            assert got.headers.get("Retry-After") == (None if seconds is None else str(seconds))
        else:
            # The frontend sent no answer to the end of its headers, or an error that breaks off.
            assert not answer.is_whole
            assert got.status == HTTPStatus.SERVICE_UNAVAILABLE
            assert json.loads(read)["error"]["message"]

    @property
    def _url(self) -> str:
        return f"{self._relay_url}/v1/chat/completions"

    @property
    def _relay_url(self) -> str:
        return f"http://{_LOOPBACK}:{self._port}"

    # -- requests

    def _ask(self, request: bytes) -> None:
        self._parts = [_OK]
        self._loop.run_until_complete(self._send(request))

    async def _send(self, request: bytes) -> None:
        """Anything is answered, or the connection ends; only the frontend is asked; the next request is served."""
        self._asked.clear()
        reader, writer = await asyncio.open_connection(_LOOPBACK, self._port)
        try:
            writer.write(request)
            writer.write_eof()
            answer = await reader.read()
            if answer:
                assert answer.startswith(b"HTTP/1.")
                assert answer.split(b" ", 2)[1] in _STATUSES
        except ConnectionError:
            pass
        finally:
            writer.close()
        async with aiohttp.ClientSession() as session, session.get(self._url) as got:
            assert got.status == 200
            assert await got.json() == {}
        assert all(url.authority == self._upstream for url in self._asked)


def _answer(rng: random.Random) -> _Answer:
    """A stream or an error, in chunks; sometimes cut, sometimes with changed bytes in its body."""
    status, body, kind = 200, _TAIL, b"text/event-stream"
    if rng.random() < 0.6:
        status, kind = rng.choice((400, 429, 500)), b"application/json"
        body = changed_json(rng, _REFUSED).encode("utf-8", "replace")
    data = b"HTTP/1.1 %d A\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % (status, kind)
    for piece in filter(None, pieces(rng, body)):
        data += b"%x\r\n%s\r\n" % (len(piece), piece)
    data += b"0\r\n\r\n"
    is_whole = rng.random() < 0.4
    if not is_whole:
        data = data[: rng.randint(0, len(data) - 1)]
    return _Answer(pieces(rng, data), body, is_whole, status)


def _request(rng: random.Random) -> bytes:
    request = rng.choice(_REQUESTS)
    if rng.random() < 0.3:
        target = rng.choice(_TARGETS).encode()
        method, _, rest = request.partition(b" ")
        return rng.choice((method, b"OPTIONS", b"CONNECT")) + b" " + target + b" " + rest.partition(b" ")[2]
    return changed_bytes(rng, request) if rng.random() < 0.9 else request[: rng.randint(0, len(request))]
