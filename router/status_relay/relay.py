"""Passes requests on to Dynamo's frontend, and its answers back.

The frontend gives a stream the status 200 before a coordinator has seen the request, and hides why a round was refused.
So the relay holds a stream's status back until its first event. A coordinator says there that it refuses the round
(`ampd.wire.refusal_comment`). The client then gets the status of the refusal instead of a stream. Where an answer has
no reason at all, the relay asks for it (`second_question`, `long_prompt`).
"""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict
from yarl import URL

from ampd.relay_mark import RelayMark
from ampd.wire import Refused, retry_after_s, with_retry_after
from router.status_relay.api_errors import error_response
from router.status_relay.api_paths import COMPLETIONS
from router.status_relay.connection_guard import Handler
from router.status_relay.first_events import first_events, has_failed, refusal_of
from router.status_relay.guarded_server import ConnectionGuards, GuardedRunner
from router.status_relay.headers import (
    MADE_BY_AIOHTTP,
    MOST_HEADER_BYTES,
    MOST_HEADERS,
    marked,
    passed_on,
    unknown_coding,
    unreadable,
)
from router.status_relay.health import HEALTH_PATH, public_health
from router.status_relay.kept_bodies import Form, KeptBodies, KeptBody
from router.status_relay.long_prompt import as_completion, may_be_too_long, too_long_in_answer
from router.status_relay.second_question import (
    PATIENCE_S,
    error_message,
    is_reason,
    is_unexplained,
    mark_of_second,
    other_form,
    refusal_in_answer,
)
from router.status_relay.served_models import ServedModels, may_be_on_its_way

DYNAMOS_BODY_LIMIT_MB = 45
"""The frontend's limit, if none is set."""

QUESTIONS_AT_ONCE = 8
"""Second questions. A burst of refusals waits for its turns, so one at a time would be too few."""

_CONNECT_TIMEOUT_S = 5.0
_EVENT_STREAM = "text/event-stream"
_WRONG, _TOO_LARGE, _UNAVAILABLE = 400, 413, 503
_OF_THE_PATH = (404, 405)
"""Statuses that a request has whatever its body is."""

_SOON_S = 1.0

_LAST_BYTES_S = 5.0
"""For clients that read slowly, when the frontend has ended."""

log = logging.getLogger(__name__)


class Relay:
    """Serves all paths by asking the frontend.

    Args:
        upstream: the frontend's URL, without a path.
        body_limit_bytes: the largest body that the frontend takes.
        health_path: where the frontend tells its health.
    """

    def __init__(
        self, upstream: str, body_limit_bytes: int = DYNAMOS_BODY_LIMIT_MB << 20, health_path: str = HEALTH_PATH
    ) -> None:
        self._upstream = upstream
        self._body_limit_bytes = body_limit_bytes
        self._health_path = health_path
        self._guards = ConnectionGuards()
        self._bodies = KeptBodies()
        self._asking = asyncio.Semaphore(QUESTIONS_AT_ONCE)
        self._reading = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._models: ServedModels | None = None

    def application(self) -> web.Application:
        """The relay as an application of aiohttp. Bodies have no limit here, because the frontend has one."""
        app = web.Application(middlewares=[self._guards.middleware, _own_errors])
        app.router.add_route("*", "/{path:.*}", self._handle, expect_handler=_expect)
        app.cleanup_ctx.append(self._client)
        app.on_response_prepare.append(_without_server)
        return app

    def runner(self) -> web.AppRunner:
        """Runs the application. Bodies stay as the client has encoded them, because their length is sent on."""
        return GuardedRunner(
            self.application(),
            self._guards,
            access_log=None,
            auto_decompress=False,
            logger=log,
            shutdown_timeout=_LAST_BYTES_S,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            max_headers=MOST_HEADERS,
        )

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, skip_auto_headers=MADE_BY_AIOHTTP
        ) as self._session:
            self._models = ServedModels(self._session, self._upstream)
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if wrong := _wrong_head(request):
            return error_response(request.path, Refused(_WRONG, wrong))
        url = URL(self._upstream + request.raw_path, encoded=True)
        with self._bodies.of(request) as kept:
            return await self._passed_on(request, url, kept)

    async def _passed_on(self, request: web.Request, url: URL, kept: KeptBody | None) -> web.StreamResponse:
        assert self._session is not None
        mark = RelayMark.fresh()
        body = kept or (request.content if request.body_exists else None)
        try:
            async with self._session.request(
                request.method, url, headers=marked(request.headers, mark), data=body, allow_redirects=False
            ) as answer:
                _acknowledge(answer)
                if answer.content_type == _EVENT_STREAM:
                    first = await first_events(answer.content)
                    refused = refusal_of(first, mark)
                    if refused is None and has_failed(request.path, first):
                        refused = await self._reason(request, url, kept, mark)
                    if refused is not None:
                        return error_response(request.path, refused)
                    if kept is not None:
                        kept.drop()
                    self._saw(request.path, answer.status)
                    return await _stream(request, answer, first)
                whole = await answer.read()
                self._saw(request.path, answer.status)
                if request.path == self._health_path:
                    return web.json_response(public_health(whole), status=answer.status)
                refused = await self._explained(request, url, kept, mark, answer.status, whole)
                return error_response(request.path, refused) if refused else _whole(answer, whole)
        except aiohttp.ClientConnectorError:
            return error_response(request.path, Refused(_UNAVAILABLE, "the frontend does not answer; retry after 1 s"))
        except aiohttp.ClientError:
            return error_response(request.path, await self._lost(request, url))

    async def _explained(
        self, request: web.Request, url: URL, kept: KeptBody | None, mark: RelayMark, status: int, body: bytes
    ) -> Refused | None:
        """What to say instead of an answer that is not streamed; None: it says enough."""
        assert self._models is not None
        if status == _TOO_LARGE and error_message(body) is None:
            return self._too_large()
        if is_unexplained(request.path, status, body):
            return await self._reason(request, url, kept, mark)
        if may_be_too_long(request.path, status, body):
            return await self._too_long(request, kept, mark)
        if may_be_on_its_way(request.method, request.path, status):
            return await self._models.on_its_way(request.path, body)
        return None

    def _too_large(self) -> Refused:
        limit = f"{self._body_limit_bytes >> 20} MB (DYN_HTTP_BODY_LIMIT_MB)"
        return Refused(_TOO_LARGE, f"the body is larger than {limit}; shorten the request")

    def _saw(self, path: str, status: int) -> None:
        assert self._models is not None
        if status != HTTPStatus.NOT_FOUND:
            self._models.answered(path)

    async def _lost(self, request: web.Request, url: URL) -> Refused:
        """Why there is no answer. One that the frontend gives before the end of a long body may be lost."""
        if request.body_exists and (status := await self._status_without_body(request, url)) in _OF_THE_PATH:
            return Refused(status, f"{HTTPStatus(status).phrase}: {request.method} {request.path}")
        body_bytes = max(request.content_length or 0, request.content.total_bytes)
        if body_bytes > self._body_limit_bytes:
            return self._too_large()
        message = "the frontend ended before it answered; send the request again"
        return Refused(_UNAVAILABLE, with_retry_after(message, _SOON_S))

    async def _status_without_body(self, request: web.Request, url: URL) -> int:
        """The status of the same request without a body; 0: no answer again."""
        assert self._session is not None
        headers = marked(request.headers, RelayMark.fresh())
        headers.popall("content-length", None)
        with suppress(aiohttp.ClientError):
            async with self._session.request(request.method, url, headers=headers, allow_redirects=False) as answer:
                return answer.status
        return 0

    async def _reason(self, request: web.Request, url: URL, kept: KeptBody | None, mark: RelayMark) -> Refused | None:
        """Ask a second time why a round was refused."""
        question = mark_of_second(request.path, mark)
        headers = marked(request.headers, question)
        form = partial(other_form, request.path)
        refused = await self._ask(url, headers, kept, form, lambda answer: refusal_in_answer(answer, question))
        return refused if refused and is_reason(request.path, refused) else None

    async def _too_long(self, request: web.Request, kept: KeptBody | None, mark: RelayMark) -> Refused | None:
        """Ask whether the prompt of `/v1/messages` is too long."""
        headers = marked(request.headers, mark.question())
        return await self._ask(URL(self._upstream + COMPLETIONS), headers, kept, as_completion, too_long_in_answer)

    async def _ask(
        self,
        url: URL,
        headers: CIMultiDict[str],
        kept: KeptBody | None,
        form: Form,
        reason_in: Callable[[aiohttp.ClientResponse], Awaitable[Refused | None]],
    ) -> Refused | None:
        """Ask in another form, few questions at a time. Bodies are read one after another: nothing else runs then."""
        assert self._session is not None
        if kept is None:
            return None
        headers.popall("content-length", None)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S), self._asking:
                async with self._reading:
                    body = kept.in_form(form)
                    await asyncio.sleep(0)  # streams go on before the next body is read
                if body is not None:
                    async with self._session.post(url, headers=headers, data=io.BytesIO(body)) as answer:
                        return await reason_in(answer)
        return None


def _wrong_head(request: web.Request) -> str | None:
    """Why a request cannot be passed on; None: it can."""
    if not request.raw_path.startswith("/"):  # `*`, or the address of another server
        return "the request names no path of this server"
    if coding := unknown_coding(request.headers):
        return f"the relay does not take the transfer coding {coding}; send the body as it is, or chunked"
    name = unreadable(request.headers)
    return None if name is None else f"the header {name} is not UTF-8; send ASCII or UTF-8"


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Let the client send its body. The relay takes no other expectation."""
    if request.headers["Expect"].lower() != "100-continue":
        response = error_response(
            request.path, Refused(HTTPStatus.EXPECTATION_FAILED, "the relay takes Expect: 100-continue only")
        )
        response.force_close()
        return response
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer, which has not begun
    return None


@web.middleware
async def _own_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The library's own errors in the form of the API."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_response(request.path, Refused(error.status, error.reason))


async def _without_server(_: web.Request, response: web.StreamResponse) -> None:
    """The frontend does not tell its version either."""
    response.headers.pop("Server", None)


def _acknowledge(answer: aiohttp.ClientResponse) -> None:
    """Tell the frontend at once that its headers are here.

    It sends the first event only then (Nagle's algorithm), for which the kernel would let it wait 40 ms on a connection
    that has served other requests.
    """
    transport = answer.connection and answer.connection.transport
    if transport and (sock := transport.get_extra_info("socket")):
        with suppress(OSError):  # the frontend has just ended
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _whole(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    headers = passed_on(answer.headers)
    if answer.method != "HEAD":  # else it tells the length of a body that does not come
        headers.popall("content-length", None)
    if answer.status >= 400 and (seconds := retry_after_s(body.decode(errors="replace"))) is not None:
        headers["Retry-After"] = str(seconds)
    return web.Response(status=answer.status, body=body, headers=headers)


async def _stream(request: web.Request, answer: aiohttp.ClientResponse, first: bytes) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))
    await response.prepare(request)
    try:
        await response.write(first)
        async for part in answer.content.iter_any():
            await response.write(part)
    except aiohttp.ClientError:  # the frontend has died, or the client has gone
        if request.transport is not None:
            request.transport.close()  # without the end of the stream, so that it does not look complete
    else:
        await response.write_eof()
    return response
