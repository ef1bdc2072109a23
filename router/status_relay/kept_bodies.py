"""Bodies of requests that the relay may have to ask again (`second_question`, `long_prompt`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

from router.status_relay.api_paths import COMPLETIONS, MESSAGES, RESPONSES

MOST_BYTES = 64 << 20
"""A longer body is not kept, so that its request cannot be asked again."""

MOST_BYTES_IN_ALL = 256 << 20
"""Of all bodies at one time. A request whose body goes beyond it keeps the frontend's error without a reason."""

_PATHS = (COMPLETIONS, RESPONSES, MESSAGES)


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
        self._is_messages = request.path == MESSAGES
        self._all = kept
        self._parts: list[bytes] = []
        self._bytes = 0
        self._is_kept = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._content.iter_any():
            self._keep(part)
            yield part

    def drop(self) -> None:
        """Keep it no longer: the answer has begun, and lasts as long as the round."""
        self._is_kept = False
        self._all.kept_bytes -= self._bytes
        self._bytes = 0
        self._parts.clear()

    def read(self) -> dict[str, Any] | None:
        """The request; None: it was not kept, or is no object."""
        with suppress(ValueError, RecursionError):
            value = json.loads(b"".join(self._parts))
            if isinstance(value, dict):
                return value
        return None

    def asked_again(self) -> dict[str, Any] | None:
        """The request in the form that shows the reason; None: as in `read`."""
        value = self.read()
        return None if value is None else {**value, "stream": self._is_messages or not value.get("stream")}

    def _keep(self, part: bytes) -> None:
        if not self._is_kept:
            return
        self._parts.append(part)
        self._bytes += len(part)
        self._all.kept_bytes += len(part)
        if self._bytes > MOST_BYTES or self._all.kept_bytes > MOST_BYTES_IN_ALL:
            self.drop()
