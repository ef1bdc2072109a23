"""Passes requests on to Dynamo's frontend, and its answers back.

The frontend gives a stream the status 200 before a coordinator has seen the request, and hides why a round was refused.
So the relay holds a stream's status back until its first event. A coordinator says there that it refuses the round
(`ampd.wire.refusal_comment`). The client then gets the status of the refusal instead of a stream. Where an answer has
no reason at all, the relay asks for it (`second_question`, `long_prompt`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from ampd.wire import IN_COMMENT, RELAY_HEADER, Refused, retry_after_s
from router.status_relay.first_events import first_events, has_failed, refusal_of
from router.status_relay.long_prompt import COMPLETIONS, as_completion, may_be_too_long, too_long_in_answer
from router.status_relay.second_question import (
    MESSAGES,
    KeptBody,
    is_unexplained,
    kept_body,
    mark_of_second,
    refusal_in_answer,
)

_CONNECT_TIMEOUT_S = 5.0
_OF_ONE_CONNECTION = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "expect")
)
"""Headers that describe one connection, or that each side makes anew.

Others that `Connection` names go through, because a client could take away headers that a gateway has set."""

_MADE_BY_AIOHTTP = ("Accept-Encoding", "User-Agent", "Content-Type")
"""Headers that the library would add where the client sent none."""

_EVENT_STREAM = "text/event-stream"
_WRONG, _UNAVAILABLE = 400, 503


class Relay:
    """Serves all paths by asking the frontend.

    Args:
        upstream: the frontend's URL, without a path.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """The relay as an application of aiohttp. Bodies have no limit here, because the frontend has one."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.cleanup_ctx.append(self._client)
        return app

    def runner(self) -> web.AppRunner:
        """Runs the application. Bodies stay as the client has encoded them, because their length is sent on."""
        return web.AppRunner(self.application(), access_log=None, handler_cancellation=True, auto_decompress=False)

    async def _client(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, auto_decompress=False, skip_auto_headers=_MADE_BY_AIOHTTP
        ) as self._session:
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        if not request.raw_path.startswith("/"):  # `*`, or the address of another server
            return _error(request, Refused(_WRONG, "the request names no path of this server"))
        url = URL(self._upstream + request.raw_path, encoded=True)
        kept = kept_body(request)
        body = kept or (request.content if request.body_exists else None)
        try:
            async with self._session.request(
                request.method, url, headers=_marked(request.headers, IN_COMMENT), data=body, allow_redirects=False
            ) as answer:
                if answer.content_type == _EVENT_STREAM:
                    first = await first_events(answer.content)
                    refused = refusal_of(first, IN_COMMENT)
                    if refused is None and has_failed(request.path, first):
                        refused = await self._reason(request, url, kept)
                    if refused is not None:
                        return _error(request, refused)
                    if kept is not None:
                        kept.drop()
                    return await _stream(request, answer, first)
                whole = await answer.read()
                refused = None
                if is_unexplained(request.path, answer.status, whole):
                    refused = await self._reason(request, url, kept)
                elif may_be_too_long(request.path, answer.status, whole):
                    refused = await self._too_long(request, kept)
                return _error(request, refused) if refused else _whole(answer, whole)
        except aiohttp.ClientConnectorError:
            return _error(request, Refused(_UNAVAILABLE, "the frontend does not answer; retry after 1 s"))
        except aiohttp.ClientError:
            message = "the frontend ended before it answered; send the request again"
            return _error(request, Refused(_UNAVAILABLE, message))

    async def _reason(self, request: web.Request, url: URL, kept: KeptBody | None) -> Refused | None:
        """Ask a second time why a round was refused."""
        if kept is None or (body := kept.asked_again()) is None:
            return None
        mark = mark_of_second(request.path)
        return await refusal_in_answer(self._ask(request, url, body, mark), mark)

    async def _too_long(self, request: web.Request, kept: KeptBody | None) -> Refused | None:
        """Ask whether the prompt of `/v1/messages` is too long."""
        if kept is None or (message := kept.read()) is None:
            return None
        url = URL(self._upstream + COMPLETIONS)
        return await too_long_in_answer(self._ask(request, url, as_completion(message), IN_COMMENT))

    def _ask(
        self, request: web.Request, url: URL, body: dict[str, object], mark: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None
        headers = _marked(request.headers, mark)
        headers.popall("content-length", None)
        # As few bytes as the client sent, because the frontend limits them. Half a character is written as an escape.
        text = json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")
        return self._session.post(url, headers=headers, data=text)


def _whole(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    headers = _kept(answer.headers)
    headers.popall("content-length", None)
    if answer.status >= 400 and (seconds := retry_after_s(body.decode(errors="replace"))) is not None:
        headers["Retry-After"] = str(seconds)
    return web.Response(status=answer.status, body=body, headers=headers)


async def _stream(request: web.Request, answer: aiohttp.ClientResponse, first: bytes) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
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


def _error(request: web.Request, refused: Refused) -> web.Response:
    """The body of Anthropic's API, or the fields of Dynamo's own errors with OpenAI's part `error`."""
    kind = _TYPES.get(refused.status, "server_error")
    if request.path == MESSAGES:
        kind = "api_error" if kind == "server_error" else kind
        body: dict[str, object] = {"type": "error", "error": {"type": kind, "message": refused.message}}
    else:
        body = {"message": refused.message, "type": kind, "code": refused.status}
        body["error"] = dict(body)
    response = web.json_response(body, status=refused.status)
    if (seconds := retry_after_s(refused.message)) is not None:
        response.headers["Retry-After"] = str(seconds)
    return response


_TYPES = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
"""As in the APIs of OpenAI and Anthropic."""


def _marked(headers: CIMultiDictProxy[str], mark: str) -> CIMultiDict[str]:
    kept = _kept(headers)
    kept[RELAY_HEADER] = mark
    return kept


def _kept(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_ONE_CONNECTION)
