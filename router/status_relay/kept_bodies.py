"""Bodies of requests that the relay may have to ask again (`second_question`, `long_prompt`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from aiohttp import web

from router.status_relay.api_paths import CHATS, COMPLETIONS, MESSAGES, RESPONSES

MOST_BYTES = 4 << 20
"""A longer body is not kept, so that its request cannot be asked again: nothing else runs while it is read."""

MOST_BYTES_IN_ALL = 256 << 20
"""Of all bodies at one time. A request whose body goes beyond it keeps the frontend's error without a reason."""

Form: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the request that shows a reason."""

_PATHS = (CHATS, COMPLETIONS, RESPONSES, MESSAGES)


class KeptBodies:
    """The bodies that are kept at one time.

    Attributes:
        kept_bytes: of all of them.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0

    @contextmanager
    def of(self, request: web.Request) -> Iterator[KeptBody | None]:
        """The body of a request whose answer may lack a reason; None: of all others, and of an encoded one.

        It is dropped at the end of the block.
        """
        may_lack = request.path in _PATHS and request.method == "POST" and "content-encoding" not in request.headers
        if not (may_lack and request.body_exists):
            yield None
            return
        body = KeptBody(request, self)
        try:
            yield body
        finally:
            body.drop()


class KeptBody:
    """The body of a request on its way to the frontend, which is kept until no second question can come."""

    def __init__(self, request: web.Request, kept: KeptBodies) -> None:
        self._content = request.content
        self._all = kept
        self._kept = bytearray()
        self._is_kept = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._content.iter_any():
            self._keep(part)
            yield part

    def drop(self) -> None:
        """Keep it no longer: the answer has begun, and lasts as long as the round."""
        self._is_kept = False
        self._all.kept_bytes -= len(self._kept)
        self._kept = bytearray()

    def in_form(self, form: Form) -> bytes | None:
        """The request in another form, encoded; None: it was not kept, or is no object.

        The objects of a body may take 30 times its bytes, so they do not outlive the call.
        """
        with suppress(ValueError, RecursionError):
            value = json.loads(self._kept)
            if isinstance(value, dict):
                # As few bytes as the client sent, because the frontend limits them. Half a character becomes an escape.
                text = json.dumps(form(value), ensure_ascii=False, separators=(",", ":"))
                return text.encode("utf-8", "backslashreplace")
        return None

    def _keep(self, part: bytes) -> None:
        if not self._is_kept:
            return
        self._kept += part
        self._all.kept_bytes += len(part)
        if len(self._kept) > MOST_BYTES or self._all.kept_bytes > MOST_BYTES_IN_ALL:
            self.drop()
