"""`python -m workers` that ends itself after two seconds of standstill, and that stands still when a signal says so.

SIGUSR1 blocks its event loop, SIGUSR2 the renewal of its lease. SIGHUP keeps the interpreter for `HELD_S`, as a
collection of garbage does.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import time

from ampd.child_process import exit_now
from workers import component
from workers.__main__ import main
from workers.publisher import Publisher

LIMIT_S = 2.0
HELD_S = 4.0


class _Watchdog(component.Watchdog):
    def start(self) -> None:
        super().start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, time.sleep, 1000)
        loop.add_signal_handler(signal.SIGUSR2, setattr, Publisher, "_flush", _hang)
        loop.add_signal_handler(signal.SIGHUP, _hold)


async def _hang(_publisher: Publisher) -> None:
    await asyncio.get_running_loop().create_future()


def _hold() -> None:
    ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))
    print("held", flush=True)


if __name__ == "__main__":
    component.LEAST_S = LIMIT_S
    component.Watchdog = _Watchdog  # type: ignore[misc]
    exit_now(main())
