"""The call of a round's first worker, made while the shared state takes the placement.

Few writes are refused, so the call does not wait for the answer to the write. But nothing that the worker says is read
before, so that only the owner of a session answers its rounds. If the write was refused, the call is stopped, and what
its worker has computed meanwhile is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

from ampd.handler_stream import Chunk
from router.calls import CallContext, LinkedContexts
from router.placement import Placement

Chunks: TypeAlias = AsyncIterator[Chunk]

Call: TypeAlias = Callable[[CallContext], Coroutine[Any, Any, Chunks]]
"""Calls a worker, and returns its answer."""


class PendingCall(NamedTuple):
    """A call whose worker has not taken it yet."""

    context: CallContext
    chunks: Awaitable[Chunks]


class HeadStart:
    """At most one call of a round that has begun before its placement holds."""

    def __init__(self, links: LinkedContexts) -> None:
        self._links = links
        self._begun: tuple[str, PendingCall] | None = None

    def begin(self, expected: Placement, call: Call) -> None:
        """Begin the call of a placement that is expected to hold."""
        self.stop()
        context = self._links.new()
        chunks = asyncio.create_task(call(context))
        chunks.add_done_callback(_note_error)
        self._begun = (expected.plan.task.task_id, PendingCall(context, chunks))

    def take(self, placement: Placement, call: Call) -> PendingCall:
        """The call that has begun, if it is that of this placement; else a new one."""
        if self._begun is not None and self._begun[0] == placement.plan.task.task_id:
            pending, self._begun = self._begun[1], None
            return pending
        self.stop()
        context = self._links.new()
        return PendingCall(context, call(context))

    def stop(self) -> None:
        """Stop the call that has begun, because its placement does not hold."""
        if self._begun is not None:
            # Its task ends by itself: a call that is cancelled halfway could go on at the worker.
            self._begun[1].context.stop_generating()
            self._begun = None


def _note_error(answer: asyncio.Task[Chunks]) -> None:
    """Take the error of a call that nobody may await any more."""
    if not answer.cancelled():
        answer.exception()
