"""Waiting for a condition in a test, by asking until it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until an (async) condition gives something true; returns it."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline_s, "it never came true"
        await asyncio.sleep(0.02)
