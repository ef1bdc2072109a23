"""The relay before Dynamo's frontend, against a frontend of the test's own."""

import asyncio
import gzip
import io
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from ampd.wire import with_retry_after
from router.status_relay import relay
from router.status_relay.relay import Relay
from tests.router.status_relay.serving import client_of_relay, connected, serving

FULL = with_retry_after("the queue is full", 7.2)
EVENTS = (b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b"data: [DONE]\n\n")


class Frontend:
    """Answers as it is told, and remembers what was asked."""

    def __init__(self) -> None:
        self.events: tuple[bytes, ...] = EVENTS
        self.too_large = b""
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.left = asyncio.Event()
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/stream", self._stream)
        app.router.add_route("*", "/whole{status:.*}", self._whole)
        app.router.add_post("/v1/{kind:.+}", self._too_large)
        return app

    def runner(self) -> web.AppRunner:
        limits: Any = {"max_field_size": 1 << 20}
        return web.AppRunner(self.application(), handler_cancellation=True, auto_decompress=False, **limits)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-own": "1"})
        await response.prepare(request)
        try:
            for number, event in enumerate(self.events):
                if number:
                    await self.go_on.wait()
                await response.write(event)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response

    async def _too_large(self, _: web.Request) -> web.Response:
        return web.Response(status=413, body=self.too_large, content_type="text/plain")

    async def _whole(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked.append((request.method, request.raw_path, dict(request.headers), body))
        status = int(request.query.get("status", "200"))
        message = request.query.get("message", FULL)
        back = {name: text for name, text in request.headers.items() if name.lower() == "x-request-id"}
        return web.json_response({"message": message}, status=status, headers={"x-own": "1", **back})


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Frontend, aiohttp.ClientSession]]:
    frontend = Frontend()
    async with client_of_relay(frontend.runner()) as client:
        yield frontend, client


async def test_a_stream_arrives_event_by_event() -> None:
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        async with client.post("/stream") as answer:
            assert (answer.status, answer.headers["x-own"], answer.content_type) == (200, "1", "text/event-stream")
            assert await answer.content.readany() == EVENTS[0]
            frontend.go_on.set()
            assert await answer.content.read() == b"".join(EVENTS[1:])


async def test_a_stream_without_any_event_ends() -> None:
    async with relayed() as (frontend, client):
        frontend.events = ()
        async with client.post("/stream") as answer:
            assert (answer.status, await answer.content.read()) == (200, b"")


async def test_a_client_that_leaves_ends_the_request_at_the_frontend() -> None:
    async with relayed() as (frontend, client):
        frontend.go_on.clear()
        async with client.post("/stream") as answer:
            await answer.content.readany()
            answer.close()
        async with asyncio.timeout(30):
            await frontend.left.wait()


async def test_requests_and_answers_go_through_whole() -> None:
    async with relayed() as (frontend, client):
        body = b"x" * (3 << 20)
        headers = {"x-dynamo-session-id": "s", "connection": "close, x-tenant-id", "expect": "100-continue"}
        headers |= {"x-tenant-id": "t", "keep-alive": "timeout=5"}
        async with client.put("/whole/%2Fa?b=%20c", data=io.BytesIO(body), headers=headers) as answer:
            assert (answer.status, answer.headers["x-own"]) == (200, "1")
            assert "retry-after" not in answer.headers
            assert await answer.json() == {"message": FULL}
        method, path, seen, received = frontend.asked[0]
        assert (method, path, received) == ("PUT", "/whole/%2Fa?b=%20c", body)
        assert seen["x-dynamo-session-id"] == "s"
        assert "keep-alive" not in {name.lower() for name in seen}
        assert seen["x-tenant-id"] == "t", "a client cannot take away what its gateway has set"


async def test_no_header_is_added_that_the_client_did_not_send() -> None:
    async with relayed() as (frontend, client):
        bare = ("Accept-Encoding", "User-Agent", "Content-Type", "Accept")
        async with client.request("POST", "/whole/a", data=b"{}", skip_auto_headers=bare) as answer:
            assert answer.status == 200
            assert "server" not in answer.headers
        names = {name.lower() for name in frontend.asked[0][2]}
        assert not names & {"accept", "accept-encoding", "user-agent", "content-type"}


async def test_an_encoded_body_goes_through_as_it_is() -> None:
    body = gzip.compress(b"{}")
    async with relayed() as (frontend, client):
        async with client.post("/whole/a", data=body, headers={"content-encoding": "gzip"}) as answer:
            assert answer.status == 200
        assert frontend.asked[0][3] == body


@pytest.mark.parametrize(("status", "seconds"), [(429, "8"), (503, "8"), (200, None)])
async def test_an_error_that_names_a_time_gets_the_header(status: int, seconds: str | None) -> None:
    async with relayed() as (_, client), client.get(f"/whole?status={status}") as answer:
        assert (answer.status, answer.headers.get("retry-after")) == (status, seconds)


@pytest.mark.parametrize(("status", "seconds"), [(429, None), (503, "1")])
async def test_what_is_unavailable_may_be_asked_again_soon(status: int, seconds: str | None) -> None:
    async with relayed() as (_, client), client.get(f"/whole?status={status}&message=away") as answer:
        assert (answer.status, answer.headers.get("retry-after")) == (status, seconds)


async def test_a_frontend_that_does_not_answer_is_503() -> None:
    async with (
        serving(Relay("http://127.0.0.1:1").runner()) as url,
        aiohttp.ClientSession(url) as client,
        client.get("/health") as answer,
    ):
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_headers_may_be_long() -> None:
    async with relayed() as (frontend, client):
        headers = {"authorization": "x" * 60_000, **{f"x-{number}": "y" for number in range(90)}}
        async with client.get("/whole", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        ((_, _, asked, _),) = frontend.asked
        assert headers.items() <= {name.lower(): value for name, value in asked.items()}.items()


async def test_a_long_id_that_the_frontend_sends_back_arrives() -> None:
    async with relayed() as (_, client), client.get("/whole", headers={"x-request-id": "r" * 60_000}) as answer:
        assert (answer.status, len(answer.headers["x-request-id"])) == (200, 60_000), await answer.text()


async def test_the_frontends_headers_are_acknowledged_at_once() -> None:
    """Else Nagle's algorithm holds the first event back until the kernel's delayed acknowledgement, for 40 ms."""
    frontend = Frontend()
    async with serving(frontend.runner()) as behind:
        relay = Relay(behind)
        async with serving(relay.runner()) as url, aiohttp.ClientSession(url) as client:
            async with client.post("/stream") as answer:
                await answer.read()
            frontend.go_on.clear()  # on a new connection the kernel acknowledges at once by itself
            async with client.post("/stream") as answer:
                assert relay._session is not None
                assert relay._session.connector is not None
                (held,) = relay._session.connector._acquired
                assert held.transport is not None
                sock = held.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1
                frontend.go_on.set()
                await answer.read()


async def test_what_is_no_http_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Relay("http://127.0.0.1:1").runner()) as url:
        reader, writer = await connected(url)
        writer.write(b"GET / HTTP/1.1\r\nsecret\x00: secret\r\n\r\n")
        assert (await reader.read()).split()[1] == b"400"
        writer.close()
    assert caplog.text == ""


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_long_body_at_whose_beginning_the_frontend_closes_is_413(is_chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * (1 << 16)

    async with ending(b"", 1 << 20) as url, aiohttp.ClientSession(url) as client:
        data = chunks() if is_chunked else io.BytesIO(b"x" * (4 << 20))
        async with client.post("/whole", data=data) as answer:
            assert answer.status == 413
            assert "1 MB (DYN_HTTP_BODY_LIMIT_MB)" in (await answer.json())["error"]["message"]


async def test_a_413_has_the_form_of_the_api() -> None:
    async with relayed() as (frontend, client):
        frontend.too_large = b"Failed to buffer the request body: length limit exceeded"
        for path in ("/v1/chat/completions", "/v1/messages"):
            async with client.post(path, json={}) as answer:
                assert answer.status == 413
                body = await answer.json()
                assert "45 MB (DYN_HTTP_BODY_LIMIT_MB)" in body["error"]["message"]
                assert (body.get("type") == "error") == (path == "/v1/messages")
        frontend.too_large = b'{"message": "another limit"}'
        async with client.post("/v1/completions", json={}) as answer:
            assert (answer.status, await answer.read()) == (413, frontend.too_large)


async def test_parts_that_are_nested_too_deeply_are_refused_with_a_reason() -> None:
    part = '"text"'
    for _ in range(900):
        part = f'{{"type": "search_result", "content": {part}}}'
    body = f'{{"messages": [{{"role": "user", "content": [{part}, {{"type": "input_audio"}}]}}]}}'
    async with relayed() as (_, client), client.post("/v1/chat/completions", data=body) as answer:
        assert answer.status == 400
        assert "nested too deeply" in (await answer.json())["error"]["message"]


async def test_an_early_404_whose_answer_is_lost_is_no_503() -> None:
    """As of a graph without `/v1/messages`: libraries would send the request again and again after a 503."""

    async def answer_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: 0" in head.lower() or b"content-length" not in head.lower():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer_early, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with (
            serving(Relay(f"http://{host}:{port}").runner()) as url,
            aiohttp.ClientSession(url) as client,
            client.post("/v1/messages", data=io.BytesIO(b"x" * (4 << 20))) as answer,
        ):
            assert answer.status == 404
            assert await answer.json() == {
                "type": "error",
                "error": {"type": "not_found_error", "message": "Not Found: POST /v1/messages"},
            }


@asynccontextmanager
async def ending(sends: bytes, body_limit_bytes: int = 45 << 20) -> AsyncIterator[str]:
    """A relay before a frontend that sends this and ends."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sends)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with serving(Relay(f"http://127.0.0.1:{port}", body_limit_bytes).runner()) as url:
        yield url
    server.close()
    await server.wait_closed()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize("sends", [b"", b"HTTP/1.1 200"])
async def test_a_frontend_that_ends_before_its_answer_is_a_503(sends: bytes) -> None:
    async with ending(sends) as url, aiohttp.ClientSession(url) as client, client.get("/stream") as answer:
        assert answer.status == 503
        assert "send the request again" in (await answer.json())["error"]["message"]
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("sends", [HEAD, HEAD + b"9\r\ndata: 1\n\n\r\n", WHOLE_HEAD + b"{"])
async def test_an_answer_whose_frontend_ends_does_not_look_complete(sends: bytes) -> None:
    async with ending(sends) as url, aiohttp.ClientSession(url) as client, client.get("/stream") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_request_to_another_server_is_refused() -> None:
    async with ending(b"") as url:
        reader, writer = await connected(url)
        writer.write(b"GET http://example.com/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        ([("session-id", "tree")], ["tree"]),
        ([("Session-Id", " tree "), ("Thread-Id", " root ")], ["tree/root"]),
        ([("session-id", "tree"), ("thread-id", "")], ["tree"]),
        ([("session-id", "tree"), ("session-id", "b"), ("thread-id", "root"), ("thread-id", "c")], ["tree/root"]),
        ([("session-id", "tree"), ("thread-id", "r\u00f6\u00f6t")], ["UTF-8''tree/r%C3%B6%C3%B6t"]),
        ([("session-id", " "), ("thread-id", "root")], ["root"]),
        ([("thread-id", "root")], ["root"]),
        ([("x-dynamo-session-id", "own"), ("session-id", "tree"), ("thread-id", "root")], ["own"]),
        ([("x-dynamo-session-id", ""), ("x-dynamo-session-id", "b"), ("session-id", "tree")], ["tree"]),
        ([("x-claude-code-session-id", "own"), ("session-id", "tree"), ("thread-id", "root")], ["own"]),
        ([("x-claude-code-session-id", "own"), ("x-claude-code-agent-id", "scout")], ["own/scout"]),
        ([("x-claude-code-agent-id", "scout")], []),
        ([("x-claude-code-session-id", ""), ("session-id", "tree"), ("thread-id", "root")], ["tree/root"]),
        ([("x-claude-code-agent-id", "own"), ("session-id", "tree"), ("thread-id", "root")], ["tree/root"]),
        ([("x-session-id", "second"), ("session-id", "tree")], ["tree"]),
        ([("x-session-id", "second"), ("thread-id", "root")], ["root"]),
    ],
)
async def test_each_thread_is_named_as_a_session_of_its_own(sent: list[tuple[str, str]], names: list[str]) -> None:
    seen: list[CIMultiDict[str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(CIMultiDict(request.headers))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    async with client_of_relay(web.AppRunner(app)) as client, client.get("/", headers=CIMultiDict(sent)) as reply:
        assert reply.status == 200
    assert seen[0].getall("x-dynamo-session-id", []) == names
    own = [(name.lower(), value.strip()) for name, value in sent if name.lower() in ("session-id", "thread-id")]
    assert [(name.lower(), value) for name, value in seen[0].items() if name.lower() in dict(own)] == own


@pytest.mark.parametrize("status", [200, 503])
async def test_who_waits_long_for_an_answer_in_one_piece_gets_empty_lines(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_SILENCE_S", 0.05)
    monkeypatch.setattr(relay, "_BEAT_S", 0.05)
    answers = asyncio.Event()

    async def answer_late(_: web.Request) -> web.Response:
        await answers.wait()
        return web.json_response({"choices": []}, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer_late)
    async with serving(web.AppRunner(app)) as behind, serving(Relay(behind).runner()) as url:
        async with aiohttp.ClientSession(url) as client, client.post("/v1/chat/completions", json={}) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert await answer.content.readexactly(3) == b"\n\n\n"
            answers.set()
            if status == 200:
                assert (await answer.read()).strip() == b'{"choices": []}'
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
        async with aiohttp.ClientSession(url) as client, client.post("/v1/chat/completions", json={}) as answer:
            assert answer.status == status


async def test_a_redirection_is_the_clients() -> None:
    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "/whole"})

    frontend = Frontend()
    app = frontend.application()
    app.router.add_post("/away", redirect)
    async with (
        client_of_relay(web.AppRunner(app)) as client,
        client.post("/away", data=b"{}", allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers["location"]) == (307, "/whole")
    assert frontend.asked == []


async def test_more_streams_than_the_librarys_limit_are_served_at_a_time() -> None:
    frontend = Frontend()
    frontend.go_on.clear()
    async with (
        serving(frontend.runner()) as behind,
        serving(Relay(behind).runner()) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client,
        asyncio.timeout(60),
        AsyncExitStack() as streams,
    ):
        for _ in range(101):
            answer = await streams.enter_async_context(client.post("/stream"))
            assert await answer.content.readany() == EVENTS[0]
        frontend.go_on.set()


async def test_head_tells_the_length_that_the_frontend_tells() -> None:
    async with relayed() as (_, client):
        async with client.get("/whole") as answer:
            length = len(await answer.read())
        async with client.head("/whole") as answer:
            assert (answer.status, answer.content_length, await answer.read()) == (200, length, b"")
