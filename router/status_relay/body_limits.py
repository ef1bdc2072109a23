"""How slowly the body of a request may come.

The library waits for the end of a body for ever. It also does not tell a body that waits when a later packet breaks its
framing. So each body has a least rate. No time counts in which the frontend is slower than the client: the library then
stops reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import StreamReader

WINDOW_S = 60.0

LEAST_BYTES = 60 << 10
"""Of a body in each window, until it is complete: 1 KiB/s."""


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
