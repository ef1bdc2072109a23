"""The first requests of an engine, which take seconds, and more where kernels are compiled."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from workers.engines.base import Engine, EngineError, EngineRequest

_TOKENS = (300, 20)
WARM_UP_S = 600.0
"""Kernels may be compiled meanwhile, which takes minutes."""


async def warmed_up(engine: Engine, lost: asyncio.Future[str]) -> None:
    """Run two requests. SGLang waits for ever for requests of a process that has ended or hangs, and this does not.

    Args:
        lost: done, with one line, when a process of the engine has ended.

    Raises:
        EngineError: a process has ended, or the requests take too long.
    """
    requests = asyncio.create_task(_run_requests(engine))
    either: set[asyncio.Future[Any]] = {requests, lost}
    try:
        await asyncio.wait(either, timeout=WARM_UP_S, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            raise EngineError(f"{lost.result()} while it warmed up")
        if not requests.done():
            raise EngineError(f"SGLang hangs: its first requests took more than {WARM_UP_S:g} s")
        await requests
    finally:
        requests.cancel()
        await asyncio.wait({requests})


async def _run_requests(engine: Engine) -> None:
    for length in _TOKENS:
        tokens = [1 + position % 50 for position in range(min(length, engine.info.max_context_tokens - 8))]
        async for _ in engine.generate(EngineRequest(uuid4().hex, "", tokens, 4)):
            pass
