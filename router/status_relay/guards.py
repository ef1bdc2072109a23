"""Limits of what a client sends and holds: time of a head, rate of a body, what waits for its turn, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeAlias, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from ampd.wire import with_retry_after
from router.status_relay.api import Refused, error_response, last_answer

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_HEAD_BYTES = 256 << 10
"""Of the request line and all headers. The frontend takes 500 KB."""

PATIENCE_S = 20.0
"""From the first byte of a head to its end."""

SILENCE_S = 75.0
"""Until the first byte of a connection. The library waits as long between two requests; for the first one, for ever."""

RESERVED_S = 5.0
"""Life of a connection beyond the bound of connections. Probes wait 4 s."""

WINDOW_S = 60.0

LEAST_BYTES = 60 << 10
"""Of a body in each window, until it is complete: 1 KiB/s."""

_LOOP_STEPS = 4
"""Turns of the loop until the library has called the handler for a head that is complete, with one to spare. Until
then nobody can tell a long body, which comes with its head, from a long head."""


class BodyWatch:
    """Watches the body of one request from the end of its head to its own end.

    Args:
        content: the body, as the library reads it.
        transport: of its connection.
        gives_up: called once if the body comes too slowly.
    """

    def __init__(self, content: StreamReader, transport: asyncio.Transport, gives_up: Callable[[], object]) -> None:
        self._content = content
        self._transport = transport
        self._gives_up = gives_up
        self._is_frontends_turn = False
        self._had_to_wait = False
        self._timer: asyncio.TimerHandle | None = None
        if not content.is_eof():
            self._begin_window()

    def received(self, *, has_grown: bool) -> None:
        """A packet has come.

        Args:
            has_grown: the body has become longer by it. Packets behind a broken chunk also stop the reading.
        """
        self._is_frontends_turn = has_grown and not self._transport.is_reading()
        self._had_to_wait = self._had_to_wait or self._is_frontends_turn

    def stop(self) -> None:
        """The request has its answer, or its client has gone."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin_window(self) -> None:
        self._bytes_before = self._content.total_bytes
        self._had_to_wait = self._is_frontends_turn and not self._transport.is_reading()
        self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._end_window)

    def _end_window(self) -> None:
        if self._content.is_eof():
            return
        if self._content.total_bytes - self._bytes_before < LEAST_BYTES and not self._had_to_wait:
            self._gives_up()
        else:
            self._begin_window()


class ConnectionGuard(asyncio.Protocol):
    """One connection. It passes all on to the library's protocol, and ends the connection beyond a limit.

    Args:
        inner: the library's protocol.
        on_lost: called when the connection has ended.
        is_reserved: it is one beyond the bound of connections, and lives for `RESERVED_S`.
    """

    def __init__(
        self, inner: web.RequestHandler, on_lost: Callable[[web.RequestHandler], object], *, is_reserved: bool
    ) -> None:
        self._inner = inner
        self._on_lost = on_lost
        self.is_reserved = is_reserved
        self._life: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head_bytes = 0
        self._is_checking = False
        self._request: web.BaseRequest | None = None
        self._is_answering = False
        self._body: BodyWatch | None = None
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def answering(self, request: web.BaseRequest) -> Iterator[None]:
        """The head of this request is complete; it is answered while the block runs."""
        assert self._transport is not None
        self._head_bytes = 0
        self._stop_timer()
        self._request, self._is_answering = request, True
        self._body = BodyWatch(request.content, self._transport, self._body_is_slow)
        self._loop.call_soon(self.end_if_deaf)  # requests in the packet of the head
        try:
            yield
        finally:
            self._is_answering = False
            self._body.stop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in `asyncio.Protocol`; so are the methods below."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._timer = self._loop.call_later(SILENCE_S, self._transport.abort)
        if self.is_reserved:
            self._life = self._loop.call_later(RESERVED_S, self._transport.abort)
        self._inner.connection_made(transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self._stop_timer()
        if self._life is not None:
            self._life.cancel()
        self._on_lost(self._inner)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._request is None or self._request.content.is_eof():
            if self._head_bytes or data.strip(b"\r\n"):  # empty lines behind a body begin no head (RFC 9112, 2.2)
                self._count_head(len(data))
            self._inner.data_received(data)
        else:
            content = self._request.content
            bytes_before = content.total_bytes
            self._inner.data_received(data)
            if self._body is not None:
                self._body.received(has_grown=content.total_bytes > bytes_before)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def end_if_deaf(self) -> None:
        """End a connection that is not read, though the body of the request in progress is complete."""
        assert self._transport is not None
        is_complete = self._request is not None and self._request.content.is_eof()
        if self._is_answering and is_complete and not self._transport.is_reading():
            self._transport.abort()

    def _count_head(self, count: int) -> None:
        if not self._head_bytes:
            self._stop_timer()  # of the silence before
            self._timer = self._loop.call_later(PATIENCE_S, self._expired)
        self._head_bytes += count
        if self._head_bytes > MOST_HEAD_BYTES and not self._is_checking:
            self._is_checking = True
            self._loop.call_soon(self._check, _LOOP_STEPS)

    def _body_is_slow(self) -> None:
        assert self._transport is not None
        assert self._request is not None
        if self._request.writer.output_size:  # its answer has begun
            self._transport.abort()
        else:
            rate = f"{LEAST_BYTES / WINDOW_S / 1024:.3g} KiB/s"
            self._answer(HTTPStatus.REQUEST_TIMEOUT, f"the body is not valid, or came slower than {rate}")

    def _check(self, steps: int) -> None:
        if steps:
            self._loop.call_soon(self._check, steps - 1)
            return
        self._is_checking = False
        if self._head_bytes > MOST_HEAD_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._end(status, f"the headers are longer than {MOST_HEAD_BYTES >> 10} KiB in all; send fewer or shorter")

    def _expired(self) -> None:
        self._timer = None
        if self._is_answering:  # a request that has come behind another one waits for its turn
            self._timer = self._loop.call_later(PATIENCE_S, self._expired)
        else:
            self._end(HTTPStatus.REQUEST_TIMEOUT, f"the headers were not complete within {PATIENCE_S:.0f} s")

    def _end(self, status: HTTPStatus, message: str) -> None:
        assert self._transport is not None
        if self._is_answering:
            self._transport.abort()
        else:
            self._answer(status, message)

    def _answer(self, status: HTTPStatus, message: str) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        path = self._request.path if self._request is not None and self._is_answering else ""
        self._transport.write(last_answer(path, Refused(status, message)))
        self._transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# -- A server of aiohttp whose connections have guards, and whose errors have the form of the API

MOST_CONNECTIONS = 8192
"""Of clients at a time, so that nobody fills the memory with connections. A request needs one more to the frontend."""

RESERVED_CONNECTIONS = 256
"""More of them, for requests without a body, as probes are. Clients that hold all others must not end the process."""

_WITHOUT_BODY = ("GET", "HEAD")

_RETRY_S = 5.0
_READING_S = 1.0
"""For a client to read that there is no room for it."""


class ConnectionGuards:
    """The guards of all connections, by the library's protocol."""

    def __init__(self) -> None:
        self._guards: dict[web.RequestHandler, ConnectionGuard] = {}

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._guards)

    def guard(self, inner: GuardedProtocol) -> ConnectionGuard:
        """The guard of a new connection."""
        is_reserved = len(self._guards) >= MOST_CONNECTIONS
        guard = self._guards[inner] = ConnectionGuard(inner, self._guards.__delitem__, is_reserved=is_reserved)
        inner.has_parsed = guard.end_if_deaf
        return guard

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tells the guard of a connection when a head is complete, and when its answer is."""
        guard = self._guards[request.protocol]
        with guard.answering(request):
            if guard.is_reserved and request.method not in _WITHOUT_BODY:
                return error_response(request.path, _no_room())
            return await handler(request)


class GuardedRunner(web.AppRunner):
    """Runs an application whose connections have guards. It needs their middleware.

    Args:
        shutdown_timeout: for requests in progress at the end, in seconds.
        options: of each connection, as of `web.RequestHandler`.
    """

    def __init__(
        self, app: web.Application, guards: ConnectionGuards, *, shutdown_timeout: float, **options: Any
    ) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
        self._guards = guards
        self._options = options

    @property
    def server(self) -> Callable[[], asyncio.Protocol] | None:  # type: ignore[override]
        """Makes the protocol of each connection. The library's sites only call it."""
        server, loop = super().server, asyncio.get_running_loop()
        if server is None:
            return None

        def protocol() -> asyncio.Protocol:
            if len(self._guards) >= MOST_CONNECTIONS + RESERVED_CONNECTIONS:
                return _Full()
            return self._guards.guard(GuardedProtocol(server, loop=loop, **self._options))

        return protocol


def _no_room() -> Refused:
    message = f"{MOST_CONNECTIONS} connections are open, and more are not taken"
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, with_retry_after(message, _RETRY_S))


class _Full(asyncio.Protocol):
    """A connection too many. It is told so, and ends when its client has read that, or soon.

    What the client sends meanwhile is read and dropped. If it met a closed connection, some clients would get an error
    of the connection instead of the answer.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in `asyncio.Protocol`."""
        sent = cast(asyncio.WriteTransport, transport)
        sent.write(last_answer("", _no_room()))
        sent.write_eof()
        asyncio.get_running_loop().call_later(_READING_S, sent.abort)


class GuardedProtocol(web.RequestHandler):
    """The library's protocol. What is no HTTP gets an error that neither quotes it nor names the library.

    Attributes:
        has_parsed: called soon after the library has parsed some bytes.
    """

    has_parsed: Callable[[], object] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The parser still counts a request whose body ended after its turn had begun. It would stop one request before
        # this queue is full, while the socket is read on, and nothing would parse what it holds back.
        self._max_msg_queue_size -= 1

    def data_received(self, data: bytes) -> None:
        """As in the library. It also calls this itself with what it has held back, so the guard does not see it."""
        super().data_received(data)
        if self.has_parsed is not None:
            self._loop.call_soon(self.has_parsed)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As in the library. It logs no request that is no HTTP: anybody can send them, with whatever secrets."""
        if isinstance(exc, HttpProcessingError):
            return _LastAnswer(Refused(status, "the request is no valid HTTP"))
        super().handle_error(request, status, exc, message)
        return _LastAnswer(Refused(status, "the relay has failed; its log has more"))


class _LastAnswer(web.StreamResponse):
    """An error on a connection that ends with it."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(status=refused.status)
        self.force_close()
        self._refused = refused

    async def prepare(self, request: web.BaseRequest) -> None:
        """As in the library, but without its own headers."""
        await request.writer.write(last_answer(request.path, self._refused))

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing follows."""
