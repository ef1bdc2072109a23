"""Waits for what nothing reports: the effect of another process, or of a task that gives no sign."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0
"""Upper bound of a wait for another process. A machine that runs several graphs is slow, and nothing is faster for a
shorter one."""

_POLL_S = 0.005


async def until(ask: Callable[..., Any], timeout_s: float = PATIENCE_S, poll_s: float = _POLL_S) -> Any:
    """Ask until the answer is true, and return the answer. The clock is that of the event loop.

    Raises:
        TimeoutError: the answer stayed false for `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            answer = ask()
            result = await answer if inspect.isawaitable(answer) else answer
            if result:
                return result
            await asyncio.sleep(poll_s)
