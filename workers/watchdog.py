"""Ends a worker that hangs, because frontends do not leave a stream that is silent, but one that is broken."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

LEAST_S = 10.0
"""A publication to a shared state that hangs takes less: it is given up, and counts as a sign of life."""
_TICKS = 8
_LOG_S = 1.0
_FAILED = 1


class Watchdog:
    """A thread that ends the process when the event loop, or the renewal of the lease, stands still for two leases.

    By then coordinators have counted the worker as lost for a lease. Time passes in ticks of the thread: when the
    machine is busy, sleeps or collects garbage, the thread stands still too, and one late tick is one tick.

    Args:
        renewals: how often the lease was renewed, or could not be because of the shared state; None: it is not to be.
    """

    def __init__(self, lease_s: float, renewals: Callable[[], int | None]) -> None:
        self._limit_s = max(LEAST_S, 2 * lease_s)
        self._renewals = renewals
        self._renewed: int | None = None
        self._loop_ticks = self._lease_ticks = 0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """The process ends, or need not be watched any more."""
        self._stopped.set()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.wait(self._limit_s / _TICKS):
            if max(self._loop_ticks, self._lease_ticks) >= _TICKS:
                self._end("the event loop" if self._loop_ticks >= _TICKS else "the renewal of the lease")
            self._loop_ticks += 1
            self._lease_ticks += 1
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        """On the event loop."""
        self._loop_ticks = 0
        renewed = self._renewals()
        if renewed is None or renewed != self._renewed:
            self._lease_ticks, self._renewed = 0, renewed

    def _end(self, what: str) -> None:
        # What hangs may hold the lock of the log.
        end = threading.Timer(_LOG_S, os._exit, (_FAILED,))
        end.daemon = True
        end.start()
        log.error("%s stood still for %g s: this worker ends, so that its rounds go on elsewhere", what, self._limit_s)
        os._exit(_FAILED)
