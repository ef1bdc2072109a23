"""Limits of a request's head: its bytes in all, and the time in which it must be complete.

The library limits each header and their number, so that a client could fill the memory with a hundred long ones, and it
waits an hour for the end of a head. So each connection has a guard between socket and library, which counts what comes
while no body does. What comes in one packet with the end of a body is not counted: at most one read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeAlias, cast

from aiohttp import web

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_HEAD_BYTES = 256 << 10
"""Of the request line and all headers. The frontend takes 500 KB."""

PATIENCE_S = 20.0
"""From the first byte of a head to its end."""

_LOOP_STEPS = 4
"""Turns of the loop until the library has called the handler for a head that is complete, with one to spare. Until
then nobody can tell a long body, which comes with its head, from a long head."""


class HeadGuard(asyncio.Protocol):
    """One connection. It passes all on to the library's protocol, and ends the connection beyond a limit.

    Args:
        inner: the library's protocol.
        on_lost: called when the connection has ended.
    """

    def __init__(self, inner: web.RequestHandler, on_lost: Callable[[web.RequestHandler], object]) -> None:
        self._inner = inner
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head_bytes = 0
        self._is_checking = False
        self._request: web.BaseRequest | None = None
        self._is_answering = False
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def answering(self, request: web.BaseRequest) -> Iterator[None]:
        """The head of this request is complete; it is answered while the block runs."""
        self._head_bytes = 0
        self._stop_timer()
        self._request, self._is_answering = request, True
        try:
            yield
        finally:
            self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in `asyncio.Protocol`; so are the methods below."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._inner.connection_made(transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self._stop_timer()
        self._on_lost(self._inner)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._request is None or self._request.content.is_eof():
            self._head_bytes += len(data)
            if self._timer is None:
                self._timer = self._loop.call_later(PATIENCE_S, self._expired)
            if self._head_bytes > MOST_HEAD_BYTES and not self._is_checking:
                self._is_checking = True
                self._loop.call_soon(self._check, _LOOP_STEPS)
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

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
        if not self._is_answering:
            body = json.dumps({"message": message, "error": {"message": message, "code": status}}).encode()
            lines = (
                f"HTTP/1.1 {status.value} {status.phrase}",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
                "Connection: close",
            )
            self._transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            self._transport.close()
        else:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HeadGuards:
    """The guards of all connections, by the library's protocol."""

    def __init__(self) -> None:
        self._guards: dict[web.RequestHandler, HeadGuard] = {}

    def guard(self, inner: web.RequestHandler) -> HeadGuard:
        """The guard of a new connection."""
        guard = self._guards[inner] = HeadGuard(inner, self._guards.__delitem__)
        return guard

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tells the guard of a connection when a head is complete, and when its answer is."""
        with self._guards[request.protocol].answering(request):
            return await handler(request)


class GuardedRunner(web.AppRunner):
    """Runs an application whose connections have guards. It needs their middleware."""

    def __init__(self, app: web.Application, guards: HeadGuards, **options: Any) -> None:
        super().__init__(app, **options)
        self._guards = guards

    @property
    def server(self) -> Callable[[], asyncio.Protocol] | None:  # type: ignore[override]
        """Makes the protocol of each connection. The library's sites only call it."""
        server = super().server
        if server is None:
            return None
        return lambda: self._guards.guard(server())
