"""Passes requests on to Dynamo's frontend, and its answers back as they come.

An error whose message names a time gets `Retry-After`, because a coordinator gives the frontend a message and no
headers, and so does every 503. A 404 of a model that is on its way is a 503. Health is told without the ids and the
addresses of the graph. Dynamo gets the names of sessions in its own header (`sessions`). Requests that the frontend
refuses are mended (`mending`), and so are cut calls (`cut_calls`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ampd.keys import SESSION_HEADER
from ampd.wire import COORDINATOR_COMPONENT, METADATA_PREFIX, REPEAT, ROUND, retry_after_s, with_retry_after
from router.status_relay.api import (
    CHATS,
    COMPLETIONS,
    MESSAGES,
    MODELS,
    RESPONSES,
    SERVING_PATHS,
    Refused,
    error_message,
    error_response,
)
from router.status_relay.cut_calls import MendedStream, has_text_or_call, may_have_calls, mended_body, with_text
from router.status_relay.guards import ConnectionGuards, GuardedRunner, Handler
from router.status_relay.mending import (
    MODEL_NAME,
    CannotMendError,
    loses_parts,
    mended_request,
    stops_made_visible,
    with_known_model,
)
from router.status_relay.sessions import SOURCES, SessionNames, Source, without_changing_line

_OF_ONE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "expect")
)
"""Headers that describe one connection, or that each side makes anew.

Others that `Connection` names go through, because a client could take away headers that a gateway has set."""

MADE_BY_AIOHTTP = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
"""Headers that the library would add where the client sent none."""

MOST_HEADER_BYTES = 64 << 10
"""Of one header, and of the path. The library's 8 KB are too few for some tokens.
`guards` has their total."""

MOST_HEADERS = 100
"""As many as the frontend takes."""


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without those of one connection."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION)


def unknown_coding(headers: CIMultiDictProxy[str]) -> str | None:
    """A coding of the body other than `chunked`, which the library would not pass on; None: there is none."""
    codings = [each.strip() for value in headers.getall("transfer-encoding", ()) for each in value.split(",")]
    return next((each for each in codings if each.lower() not in ("", "chunked")), None)


def unreadable(headers: CIMultiDictProxy[str]) -> str | None:
    """The name of a header that is not UTF-8; None: all are.

    The library would leave such bytes out of what it sends. The header of one tenant could become that of another.
    """
    return next((name for name, value in headers.items() if not _is_utf_8(value)), None)


def _is_utf_8(value: str) -> bool:
    """Whether a value was UTF-8. The library reads each wrong byte as half a character."""
    return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)


# -- 404s of a graph that is on its way: Dynamo's frontend has no path of the API before it has found a model's card
#
# It has none after a card was lost either. Client libraries send a request again after 503, and not after 404.

_RETRY_AFTER_S = 1.0


def may_be_on_its_way(method: str, path: str, status: int) -> bool:
    """Whether a 404 may come from a model that is not there yet, or not any more."""
    return method == "POST" and path in SERVING_PATHS and status == HTTPStatus.NOT_FOUND


class ServedModels:
    """The models and the paths that this relay has seen.

    Args:
        session: to ask the frontend with.
        upstream: the frontend's URL.
    """

    def __init__(self, session: aiohttp.ClientSession, upstream: str) -> None:
        self._session = session
        self._upstream = upstream
        self._paths: set[str] = set()
        self._models: set[str] = set()

    def answered(self, path: str) -> None:
        """The frontend has this path."""
        if path in SERVING_PATHS:
            self._paths.add(path)

    async def on_its_way(self, path: str, body: bytes) -> Refused | None:
        """What to say instead of a 404; None: the model is unknown, or the graph does not have the path.

        Args:
            body: of the 404.
        """
        listed = await self._listed()
        if not listed:
            return _refused("no model is served at the moment")
        self._models |= listed
        if body:
            words = set((error_message(body) or "").replace("'", " ").replace("`", " ").split())
            gone = words & (self._models - listed)
            return _refused(f"the model {gone.pop()} is not served at the moment") if gone else None
        if path in self._paths or await self._has_path(path):
            return _refused("the model is not served at the moment")
        return None

    async def _listed(self) -> set[str]:
        with suppress(aiohttp.ClientError, ValueError, RecursionError):
            async with self._session.get(self._upstream + MODELS) as answer:
                match json.loads(await answer.read()):
                    case {"data": list(models)}:
                        return {str(each.get("id")) for each in models if isinstance(each, dict)}
        return set()

    async def _has_path(self, path: str) -> bool:
        """Whether the frontend has the path by now. It refuses a request without a body."""
        with suppress(aiohttp.ClientError):
            async with self._session.post(self._upstream + path) as answer:
                return answer.status != HTTPStatus.NOT_FOUND
        return True


def _refused(message: str) -> Refused:
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, with_retry_after(message, _RETRY_AFTER_S))


# -- the relay

DYNAMOS_BODY_LIMIT_MB = 45
"""The frontend's limit, if none is set."""

HEALTH_PATH = "/health"
"""The frontend's, if none is set."""

_CONNECT_TIMEOUT_S = 5.0
_WRONG, _TOO_LARGE, _UNAVAILABLE = 400, 413, 503
_REFUSED = (400, 501)
"""Statuses of requests that may be mended. The frontend refuses them before it has called a coordinator."""
_MOST_MENDS = 4
"""The frontend tells the first thing that it refuses only."""
_OF_THE_PATH = (404, 405)
"""Statuses that a request has whatever its body is."""

_SOON_S = 1

_NAMED = web.RequestKey("named", dict[str, str])
_LOST_TEXT = web.RequestKey("lost_text", partial)
"""The header that names a round with tools to its coordinator, and the way to ask for its output again."""

_LAST_BYTES_S = 5.0
"""For clients that read slowly, when the frontend has ended."""

log = logging.getLogger(__name__)


class Relay:
    """Serves all paths by asking the frontend.

    Args:
        upstream: the frontend's URL, without a path.
        body_limit_bytes: the largest body that the frontend takes.
        health_path: where the frontend tells its health.
        aliases: patterns of model names, each with the name that it stands for.
        sources: where clients name their sessions.
    """

    def __init__(
        self,
        upstream: str,
        body_limit_bytes: int = DYNAMOS_BODY_LIMIT_MB << 20,
        health_path: str = HEALTH_PATH,
        aliases: Sequence[tuple[str, str]] = (),
        sources: Sequence[Source] = SOURCES,
    ) -> None:
        self._aliases = aliases
        self._upstream = upstream
        self._names = SessionNames(sources)
        self._body_limit_bytes = body_limit_bytes
        self._health_path = health_path
        self._guards = ConnectionGuards()
        self._session: aiohttp.ClientSession | None = None
        self._models: ServedModels | None = None

    def application(self) -> web.Application:
        """The relay as an application of aiohttp. Bodies have no limit here, because the frontend has one."""
        app = web.Application(middlewares=[self._guards.middleware, _own_errors])
        app.router.add_route("*", "/{path:.*}", self._handle)
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
            timeout=timeout,
            connector=connector,
            auto_decompress=False,
            skip_auto_headers=MADE_BY_AIOHTTP,
            max_field_size=MOST_HEADER_BYTES,  # the frontend sends x-request-id back
        ) as self._session:
            self._models = ServedModels(self._session, self._upstream)
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if wrong := _wrong_head(request):
            return error_response(request.path, Refused(_WRONG, wrong))
        url = URL(self._upstream + request.raw_path, encoded=True)
        try:
            with _Waiting(request) as waiting:
                return await waiting.ended(await self._answered(request, url, waiting))
        except aiohttp.ClientConnectorError:
            return error_response(request.path, Refused(_UNAVAILABLE, "the frontend does not answer; retry after 1 s"))
        except aiohttp.ClientError:
            return error_response(request.path, await self._lost(request, url))

    async def _answered(self, request: web.Request, url: URL, waiting: _Waiting) -> web.StreamResponse:
        """The frontend's answer. A request that it refuses is mended and sent again, where that is possible."""
        body = await _whole_body(request)
        if not isinstance(body, bytes):
            async with self._asked(request, url, self._names.of(request.headers), body) as answer:
                return await self._told(request, answer)
        session = self._names.of(request.headers, body)
        body = with_known_model(without_changing_line(body), self._aliases)
        if may_have_calls(request.path) and b'"tools"' in body and (model := MODEL_NAME.search(body)):
            name = uuid4().hex
            request[_NAMED] = {METADATA_PREFIX + ROUND: name}
            request[_LOST_TEXT] = partial(self._lost_text, request, session, name, model[1].decode())
        if may_have_calls(request.path) and not _ASKS_FOR_A_STREAM.search(body):
            waiting.begin()
        try:
            return await self._mended(request, url, session, body)
        except (CannotMendError, RecursionError) as error:
            reason = "its parts are nested too deeply" if isinstance(error, RecursionError) else str(error)
            return error_response(request.path, Refused(_WRONG, reason))

    async def _mended(self, request: web.Request, url: URL, session: str, body: bytes) -> web.StreamResponse:
        if loses_parts(request.path, body):
            body = mended_request(request.path, body, "") or body
        mends = 0
        while True:
            sent, stops = stops_made_visible(request.path, body)
            async with self._asked(request, url, session, sent) as answer:
                if answer.status not in _REFUSED or mends == _MOST_MENDS:
                    sent = body = b""
                    return await self._told(request, answer, stops)
                if (mended := mended_request(request.path, body, error_message(await answer.read()) or "")) is None:
                    return await self._told(request, answer)
            body, mends = mended, mends + 1

    def _asked(self, request: web.Request, url: URL, session: str, body: Any) -> Any:
        assert self._session is not None
        headers = passed_on(request.headers)
        headers.update(request.get(_NAMED, {}))
        if session:
            headers[SESSION_HEADER] = session
        if isinstance(body, bytes):
            headers["content-length"] = str(len(body))
            body = _in_parts(body)
        return self._session.request(request.method, url, headers=headers, data=body, allow_redirects=False)

    async def _lost_text(self, request: web.Request, session: str, name: str, model: str) -> str:
        """The text of an output that the frontend could not read; empty: its coordinator does not know it any more."""
        request[_NAMED] = {METADATA_PREFIX + REPEAT: name}
        chat = {"model": model, "messages": [{"role": "user", "content": "?"}]}
        with suppress(aiohttp.ClientError, ValueError, LookupError, TypeError):
            url = URL(self._upstream + CHATS)
            async with self._asked(request, url, session, json.dumps(chat).encode()) as answer:
                return json.loads(await answer.read())["choices"][0]["message"]["content"] or ""
        return ""

    async def _told(
        self, request: web.Request, answer: aiohttp.ClientResponse, stops: Sequence[str] = ()
    ) -> web.StreamResponse:
        assert self._models is not None
        _acknowledge(answer)
        if answer.status != HTTPStatus.NOT_FOUND:
            self._models.answered(request.path)
        if request.path == self._health_path:
            return web.json_response(public_health(await answer.read()), status=answer.status)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            return await self._error(request, answer)
        return await _passed_on(request, answer, stops)

    async def _error(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.Response:
        """An error of the frontend, or what to say instead."""
        assert self._models is not None
        body = await answer.read()
        if answer.status == _TOO_LARGE and error_message(body) is None:
            return error_response(request.path, self._too_large())
        if may_be_on_its_way(request.method, request.path, answer.status) and (
            refused := await self._models.on_its_way(request.path, body)
        ):
            return error_response(request.path, refused)
        headers = passed_on(answer.headers)
        if request.method != "HEAD":  # else it tells the length of a body that does not come
            headers.popall("content-length", None)
        seconds = retry_after_s(body.decode(errors="replace"))
        if seconds is None and answer.status == _UNAVAILABLE:
            seconds = _SOON_S  # as where a coordinator was lost a moment ago
        if seconds is not None:
            headers["Retry-After"] = str(seconds)
        # Libraries send a request again after 501, which would be in vain.
        status = _WRONG if answer.status == HTTPStatus.NOT_IMPLEMENTED else answer.status
        return web.Response(status=status, body=body, headers=headers)

    def _too_large(self) -> Refused:
        limit = f"{self._body_limit_bytes >> 20} MB (DYN_HTTP_BODY_LIMIT_MB)"
        return Refused(_TOO_LARGE, f"the body is larger than {limit}; shorten the request")

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
        headers = passed_on(request.headers)
        headers.popall("content-length", None)
        with suppress(aiohttp.ClientError):
            async with self._session.request(request.method, url, headers=headers, allow_redirects=False) as answer:
                return answer.status
        return 0


def _wrong_head(request: web.Request) -> str | None:
    """Why a request cannot be passed on; None: it can."""
    if not request.raw_path.startswith("/"):  # `*`, or the address of another server
        return "the request names no path of this server"
    if coding := unknown_coding(request.headers):
        return f"the relay does not take the transfer coding {coding}; send the body as it is, or chunked"
    name = unreadable(request.headers)
    return None if name is None else f"the header {name} is not UTF-8; send ASCII or UTF-8"


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


_ASKS_FOR_A_STREAM = re.compile(rb'"stream"\s*:\s*true')
_SILENCE_S, _BEAT_S = 30.0, 15.0
"""Until the first sign of life, and between two. Proxies and clients give up a silent connection after 60 s or more.
Refusals come before the first one, and have their status."""


class _Waiting:
    """Lets a client wait for an answer in one piece: it gets a status and an empty line from time to time.

    An error behind them has no status any more. Its connection ends, so that clients ask again.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._begun = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_SILENCE_S, self._start)

    def _start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        with suppress(ConnectionError):  # the client has gone
            await self._begun.prepare(self._request)
            while True:
                await self._begun.write(b"\n")
                await asyncio.sleep(_BEAT_S)

    def __enter__(self) -> _Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def ended(self, answer: web.StreamResponse) -> web.StreamResponse:
        """The answer, behind what the client has got already."""
        self.__exit__()
        if not self._begun.prepared:
            return answer
        if answer.status == HTTPStatus.OK and isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            await self._begun.write(answer.body)
            await self._begun.write_eof()
        elif self._request.transport is not None:
            self._request.transport.close()
        return self._begun


_READ_PATHS = (CHATS, COMPLETIONS, RESPONSES, MESSAGES)
_MOST_READ_BYTES = 16 << 20
"""A longer body is sent on as it comes, and is not mended."""
_PART_BYTES = 256 << 10


async def _whole_body(request: web.Request) -> bytes | AsyncIterator[bytes] | None:
    """The body of a request, whole if it is one that may be mended."""
    if not request.body_exists:
        return None
    if request.path not in _READ_PATHS or "content-encoding" in request.headers:
        return request.content.iter_any()
    parts, size = [], 0
    async for part in request.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MOST_READ_BYTES:
            return _chained(parts, request.content.iter_any())
    return b"".join(parts)


async def _in_parts(body: bytes) -> AsyncIterator[memoryview]:
    """So that the library does not copy a long body at once, while other requests wait."""
    view = memoryview(body)
    for start in range(0, len(body), _PART_BYTES):
        yield view[start : start + _PART_BYTES]


async def _chained(parts: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    parts.clear()
    async for part in rest:
        yield part


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse, stops: Sequence[str]) -> web.StreamResponse:
    is_mended = request.method == "POST" and may_have_calls(request.path)
    is_stream = answer.content_type == "text/event-stream"
    headers = passed_on(answer.headers)
    if is_mended and not is_stream:
        body = mended_body(request.path, await answer.read(), stops)
        if _LOST_TEXT in request and not has_text_or_call(body) and (text := await request[_LOST_TEXT]()):
            body = with_text(request.path, body, text)
        headers.popall("content-length", None)
        return web.Response(status=answer.status, body=body, headers=headers)
    stream = MendedStream(request.path, stops) if is_mended else None
    response = web.StreamResponse(status=answer.status, headers=headers)
    try:
        await response.prepare(request)
        async for part in answer.content.iter_any():
            if part := stream.passed_on(part) if stream else part:
                await response.write(part)
            if stream and stream.is_stopped:
                break
        text = await request[_LOST_TEXT]() if stream and stream.is_empty and _LOST_TEXT in request else ""
        if stream and (rest := stream.end(text)):
            await response.write(rest)
        await response.write_eof()
    except aiohttp.ClientError:  # the frontend has died, or the client has gone
        if request.transport is not None:
            request.transport.close()  # without the end of the answer, so that it does not look complete
    return response


def public_health(body: bytes) -> dict[str, Any]:
    """The status, and an instance without an id for each coordinator: `ampd serve` waits for them.

    Args:
        body: the frontend's answer.
    """
    with suppress(ValueError, RecursionError):
        match json.loads(body):
            case {"status": str(status), "instances": list(instances)}:
                coordinator = {"component": COORDINATOR_COMPONENT}
                return {"status": status, "instances": [coordinator for each in instances if _is_coordinator(each)]}
            case {"status": str(status)}:
                return {"status": status}
    return {}


def _is_coordinator(instance: Any) -> bool:
    return isinstance(instance, dict) and instance.get("component") == COORDINATOR_COMPONENT
