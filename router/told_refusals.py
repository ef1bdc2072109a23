"""Why requests of the status relay were refused, for its questions about them.

Dynamo's frontend hides the reason in some forms of answers, and the relay asks for it (`router.status_relay`). Its
question must not be served, because its client has been refused already. So coordinators remember their refusals.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ampd.state.store import RequestRefused
from ampd.wire import OVERLOADED, Refused
from router.echoes import Echoes, until_heard

MEMORY_S = 10.0
"""The relay asks at once."""

_MAX_REMEMBERED = 4096


class ToldRefusals:
    """The refusals of the last seconds, by the relay's name of the request.

    A question may come to another coordinator. What that one cannot find out by itself is announced to it.

    Args:
        announce: tells the other coordinators of a refusal.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        announce: Callable[[RequestRefused], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._announce = announce
        self._refused: dict[str, tuple[float, Refused]] = {}
        self._echoes = Echoes()

    async def add(self, request: str, refused: Refused, *, is_found_anywhere: bool) -> None:
        """Remember a refusal, before its client knows it.

        Args:
            is_found_anywhere: each coordinator can find the reason out. If not, the others are told, except of an
                overload, which they answer anyway.
        """
        self._remember(request, refused)
        if is_found_anywhere or refused.status == OVERLOADED:
            return
        news = RequestRefused(request, refused.status, refused.message)
        echo = self._echoes.of(news)
        self._announce(news)
        await until_heard([echo])

    def announced(self, news: RequestRefused) -> None:
        """A coordinator, perhaps this one, has announced a refusal."""
        self._remember(news.request, Refused(news.status, news.message))
        self._echoes.heard(news)

    def of(self, request: str) -> Refused | None:
        """The refusal of this request; None: it is not known here."""
        self._forget_old()
        _, refused = self._refused.get(request, (0.0, None))
        return refused

    def _remember(self, request: str, refused: Refused) -> None:
        self._forget_old()
        self._refused.pop(request, None)
        self._refused[request] = self._clock() + MEMORY_S, refused  # at the end: the order is that of the expiry
        while len(self._refused) > _MAX_REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._refused and self._refused[oldest := next(iter(self._refused))][0] <= now_s:
            del self._refused[oldest]

    def __len__(self) -> int:
        return len(self._refused)
