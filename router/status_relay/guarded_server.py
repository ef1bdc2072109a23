"""A server of aiohttp whose connections have guards, and whose errors have the form of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ampd.wire import with_retry_after
from router.status_relay.api import Refused, error_response, last_answer
from router.status_relay.connection_guard import ConnectionGuard, Handler

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
