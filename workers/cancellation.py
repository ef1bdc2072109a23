"""Ends a round's work when its client goes, because Dynamo does not cancel a handler that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from ampd.handler_stream import Send

ItemT = TypeVar("ItemT")


class StopSignal(Protocol):
    """The part of Dynamo's `Context` that shows when the caller has gone."""

    def is_stopped(self) -> bool: ...

    def async_killed_or_stopped(self) -> Any:
        """A future that completes when the context is killed or stopped."""
        ...


async def send_until_stopped(source: AsyncGenerator[ItemT, None], context: StopSignal, send: Send[ItemT]) -> None:
    """Send the items of `source` until it ends or the caller goes. Then it is cancelled where it waits, and closed.

    `source` runs in a separate task, because the handler must outlive its cancellation.
    """
    if context.is_stopped():
        await source.aclose()
        return
    pump = asyncio.create_task(_pump(source, context, send))

    def end() -> None:
        if not pump.cancelling():
            # A second cancellation would cut the clean-up short.
            pump.cancel()

    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    stopped.add_done_callback(lambda _: end())
    try:
        await asyncio.wait({pump})
        if not pump.cancelled() and (error := pump.exception()) is not None:
            raise error
    finally:
        stopped.cancel()
        end()
        await asyncio.wait({pump})


async def _pump(source: AsyncGenerator[ItemT, None], context: StopSignal, send: Send[ItemT]) -> None:
    pump = asyncio.current_task()
    assert pump is not None
    async with aclosing(source):
        async for item in source:
            if context.is_stopped() or pump.cancelling():
                # The cancellation can have been lost, for example in `asyncio.wait_for` of Python 3.11, which forgets
                # it where it meets an answer.
                return
            send(item)
