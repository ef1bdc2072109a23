"""How slowly a body may come, and what may wait behind a request."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol

from router.status_relay import guards
from router.status_relay.guards import LEAST_BYTES, WINDOW_S, BodyWatch, ConnectionGuards, GuardedRunner
from router.status_relay.relay import Relay
from tests.router.status_relay.serving import connected, serving
from tests.virtual_time import virtually
from tests.waiting import until

SOON_S = 30.0
"""Far longer than it takes."""

LONG = 32 << 20
"""Bytes that fit into no buffer on the way."""

MESSAGE = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"
CHUNKED = MESSAGE + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":'


class Frontend:
    """Reads each body when it is told to, and answers when it has the whole."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.has_begun = asyncio.Event()
        self.left = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    def runner(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        return web.AppRunner(app, handler_cancellation=True)

    async def _serve(self, request: web.Request) -> web.Response:
        self.has_begun.set()
        try:
            await self.go_on.wait()
            body = await request.read()
            await self.answers.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return web.json_response({"bytes": len(body)})


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Frontend, str]]:
    frontend = Frontend()
    async with serving(frontend.runner()) as behind, serving(Relay(behind).runner()) as url:
        yield frontend, url


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (CHUNKED, b"\r\nzz\r\n"),  # the library queues an error for each packet, and tells the waiting body none
        (CHUNKED, b""),
        (MESSAGE + b"Content-Length: 100000\r\n\r\n{", b" "),
    ],
)
async def test_a_body_that_does_not_end_is_given_up(
    begins: bytes, goes_on: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "WINDOW_S", 1.0)
    async with relayed() as (frontend, url), asyncio.timeout(SOON_S):
        reader, writer = await connected(url)
        writer.write(begins)
        await frontend.has_begun.wait()
        for _ in range(20):  # fewer than the library queues, or it would not read them all
            writer.write(goes_on)
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(await reader.readuntil(b"}}"))
        assert "KiB/s" in error["error"]["message"]
        await frontend.left.wait()
        writer.close()


async def test_a_body_that_is_read_before_it_is_sent_on_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "WINDOW_S", 0.2)
    async with relayed() as (frontend, url), asyncio.timeout(SOON_S):
        reader, writer = await connected(url)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
        assert json.loads(await reader.readuntil(b"}}"))["type"] == "error", "in the form of the path's API"
        assert not frontend.has_begun.is_set()
        writer.close()


async def test_a_client_that_leaves_behind_a_broken_chunk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has stopped reading by then, and would not see it."""
    monkeypatch.setattr(guards, "WINDOW_S", 1.0)
    async with relayed() as (frontend, url), asyncio.timeout(SOON_S):
        _, writer = await connected(url)
        writer.write(CHUNKED)
        await frontend.has_begun.wait()
        for _ in range(40):
            writer.write(b"\r\nzz\r\n")
            await asyncio.sleep(0)
        writer.close()
        await frontend.left.wait()


async def test_a_frontend_that_does_not_read_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "WINDOW_S", 0.2)
    async with relayed() as (frontend, url), aiohttp.ClientSession(url) as client, asyncio.timeout(SOON_S):
        frontend.go_on.clear()
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", data=io.BytesIO(bytes(LONG))))
        await frontend.has_begun.wait()
        await asyncio.sleep(1)
        frontend.go_on.set()
        async with await asking as answer:
            assert (answer.status, await answer.json()) == (200, {"bytes": LONG})


GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("first", [GET, MESSAGE + b"Content-Length: 2\r\n\r\n{}"])
@pytest.mark.parametrize("is_one_packet", [True, False])
async def test_a_request_before_so_many_that_none_is_read_is_ended(first: bytes, is_one_packet: bool) -> None:
    """Nobody would notice that its client leaves."""
    async with relayed() as (frontend, url), asyncio.timeout(SOON_S):
        frontend.answers.clear()
        reader, writer = await connected(url)
        behind = GET * 40
        if is_one_packet:
            writer.write(first + behind)
        else:
            writer.write(first)
            await frontend.has_begun.wait()
            writer.write(behind)
        assert await reader.read() == b""
        writer.close()
        if not is_one_packet:
            await frontend.left.wait()


@pytest.mark.parametrize(("count", "is_ended"), [(30, False), (31, True), (32, True), (200, True)])
async def test_requests_behind_a_body_that_came_late_are_answered_or_ended(count: int, is_ended: bool) -> None:
    """From that body on the library counts one request more than there is."""
    async with relayed() as (_, url), asyncio.timeout(SOON_S):
        reader, writer = await connected(url)
        writer.write(MESSAGE + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readexactly(len(BEGUN)) == BEGUN
        writer.write(b"{}")
        assert (await answered(reader)).startswith(b"HTTP/1.1 200 ")
        writer.write(GET * count)
        if is_ended:
            with suppress(ConnectionResetError):
                assert (await reader.read()).count(b"HTTP/1.1 200 ") < count
        else:
            for _ in range(count):
                assert (await answered(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_empty_lines_behind_a_body_begin_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with relayed() as (_, url), asyncio.timeout(SOON_S):
        reader, writer = await connected(url)
        for _ in range(2):
            with monkeypatch.context() as patient:
                patient.setattr(guards, "PATIENCE_S", SOON_S)
                writer.write(MESSAGE + b"Content-Length: 2\r\n\r\n{}")
                assert (await answered(reader)).startswith(b"HTTP/1.1 200 ")
            monkeypatch.setattr(guards, "PATIENCE_S", 0.05)
            writer.write(b"\r\n")
            await asyncio.sleep(0.5)
        writer.close()


async def answered(reader: asyncio.StreamReader) -> bytes:
    """The head of the next answer; its body is read too."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"}")
    return head


BEGUN = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"{", b"}"),
        (b"", b"{}"),
        (b" " * 200_000, None),  # the library holds its end back, and parses that later
        (b" " * 1_000_000, None),
    ],
)
async def test_it_is_also_ended_if_its_body_ends_later_than_its_head(first: bytes, then: bytes | None) -> None:
    async with relayed() as (frontend, url), asyncio.timeout(SOON_S):
        frontend.answers.clear()
        reader, writer = await connected(url)
        behind = GET * 40
        head = MESSAGE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(first + (then or b""))
        writer.write(head + first + (behind if then is None else b""))
        if then is not None:
            assert await reader.readexactly(len(BEGUN)) == BEGUN, "the head is complete"
            writer.write(then + behind)
        with suppress(ConnectionResetError):
            assert await reader.read() in (b"", BEGUN)
        writer.close()
        if frontend.has_begun.is_set():
            await frontend.left.wait()


async def test_a_head_that_is_too_long_behind_a_request_ends_both() -> None:
    async with relayed() as (frontend, url), asyncio.timeout(SOON_S):
        frontend.answers.clear()
        reader, writer = await connected(url)
        writer.write(MESSAGE + b"Content-Length: 2\r\n\r\n{}")
        await frontend.has_begun.wait()
        writer.write(MESSAGE + b"".join(b"x-%d: %s\r\n" % (number, b"x" * 60_000) for number in range(6)))
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        await frontend.left.wait()


async def test_connections_that_have_ended_are_forgotten() -> None:
    guards = ConnectionGuards()
    async with serving(
        GuardedRunner(web.Application(middlewares=[guards.middleware]), guards, shutdown_timeout=1)
    ) as url:
        for _ in range(3):
            reader, writer = await connected(url)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
            assert len(guards) == 1
            writer.close()
            await until(lambda: not len(guards))


async def test_few_requests_may_wait_behind_another() -> None:
    async with relayed() as (_, url), asyncio.timeout(SOON_S):
        reader, writer = await connected(url)
        request = MESSAGE + b"Content-Length: 2\r\n\r\n{}"
        writer.write(request * 30)
        for _ in range(30):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"}")
        writer.close()


class _Transport(asyncio.Transport):
    """Is read, or waits until the frontend has taken more."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True

    def is_reading(self) -> bool:
        return self.is_read


class _Body:
    """A body whose packets come at set times."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.content = aiohttp.StreamReader(BaseProtocol(loop), 1 << 30, loop=loop)
        self.transport = _Transport()
        self.given_up_s: list[float] = []
        self.watch = BodyWatch(self.content, self.transport, lambda: self.given_up_s.append(loop.time()))

    async def comes(self, count: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.content.feed_data(b"x" * count)
        self.watch.received(has_grown=bool(count))


@virtually
async def test_a_body_may_come_at_the_least_rate_for_as_long_as_it_likes() -> None:
    body = _Body()
    for _ in range(1000):
        await body.comes(LEAST_BYTES // 10, WINDOW_S / 10.5)
    assert body.given_up_s == []
    await asyncio.sleep(2 * WINDOW_S)
    assert len(body.given_up_s) == 1


@virtually
async def test_a_body_below_the_least_rate_is_given_up_after_one_window() -> None:
    body = _Body()
    for _ in range(20):
        await body.comes(LEAST_BYTES // 10 - 1, WINDOW_S / 9.5)
    assert body.given_up_s == [WINDOW_S]


@virtually
async def test_no_time_counts_in_which_the_frontend_is_slower() -> None:
    body = _Body()
    body.transport.is_read = False
    await body.comes(1, 0.0)
    await asyncio.sleep(10.5 * WINDOW_S)
    body.transport.is_read = True
    await asyncio.sleep(WINDOW_S)
    assert body.given_up_s == []
    await asyncio.sleep(WINDOW_S)
    assert body.given_up_s == [12 * WINDOW_S]


@virtually
async def test_a_connection_that_is_not_read_for_what_came_behind_the_body_is_given_up() -> None:
    body = _Body()
    await body.comes(1, 0.0)
    body.transport.is_read = False
    await body.comes(0, 0.0)
    await asyncio.sleep(2 * WINDOW_S)
    assert body.given_up_s == [WINDOW_S]


@virtually
async def test_a_body_that_is_complete_or_answered_is_watched_no_longer() -> None:
    body, other = _Body(), _Body()
    body.content.feed_eof()
    other.watch.stop()
    await asyncio.sleep(2 * WINDOW_S)
    assert body.given_up_s == other.given_up_s == []
