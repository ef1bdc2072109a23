"""The time line of the modelled engine: modelled work follows modelled work, however late a sleep wakes up."""

from __future__ import annotations

import asyncio
import time

_MAX_LAG_S = 0.1
"""How far behind its own time line the engine may fall and still catch up by not sleeping."""


class TimeLine:
    """Sleeps for modelled times. Sleeps aim at points of one time line, so that late wake-ups do not add up."""

    def __init__(self) -> None:
        self._end_s = 0.0
        self._wake = asyncio.Event()

    def now_s(self) -> float:
        """The present time, on the clock of the worker."""
        return time.monotonic()

    def wake(self) -> None:
        """There may be work again: end a pause."""
        self._wake.set()

    async def pause(self) -> None:
        """Sleep until `wake`."""
        self._wake.clear()
        await self._wake.wait()
        self.restart()

    def restart(self) -> None:
        """Begin at the present time, after a pause without work."""
        self._end_s = time.monotonic()

    async def work(self, seconds: float, interrupt: asyncio.Event | None = None) -> None:
        """Let modelled work take its time; `interrupt` ends it early."""
        now_s = time.monotonic()
        self._end_s = max(self._end_s, now_s - _MAX_LAG_S) + seconds
        delay_s = self._end_s - now_s
        if delay_s <= 0:
            await asyncio.sleep(0)
        elif interrupt is None:
            await asyncio.sleep(delay_s)
        else:
            try:
                async with asyncio.timeout(delay_s):
                    await interrupt.wait()
                self.restart()
            except TimeoutError:
                pass
