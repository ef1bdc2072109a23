"""Waits until an announcement has come back from the shared state, because then all coordinators have got it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from ampd.state.store import RequestNews

TOLD_S = 0.5
"""Longest wait for an echo. Without the shared state none comes."""

_MOST_AWAITED = 4096


class Echoes:
    """The announcements of this coordinator that have not come back yet."""

    def __init__(self) -> None:
        self._awaited: dict[RequestNews, asyncio.Event] = {}

    def of(self, news: RequestNews) -> asyncio.Event:
        """What is set when this announcement, which is about to be made, comes back."""
        echo = self._awaited.setdefault(news, asyncio.Event())
        while len(self._awaited) > _MOST_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        return echo

    def heard(self, news: RequestNews) -> None:
        """A coordinator, perhaps this one, has announced this."""
        if echo := self._awaited.pop(news, None):
            echo.set()


async def until_heard(echoes: Iterable[asyncio.Event]) -> None:
    """Wait until all of them have come, at most for `TOLD_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(TOLD_S):
            for echo in echoes:
                await echo.wait()
