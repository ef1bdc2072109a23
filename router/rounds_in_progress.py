"""The rounds that a coordinator serves now. It also ends those that neither their client nor Dynamo reads any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Protocol

from ampd.supervised_task import InBackground, SupervisedTask
from router.outputs import Chunk

log = logging.getLogger(__name__)


class StopSignal(Protocol):
    """The part of Dynamo's `Context` that shows that the client has gone."""

    def is_stopped(self) -> bool: ...


class RoundInProgress:
    """One round.

    Attributes:
        chunks: what is sent to the client; None: there is nothing to close yet.
        is_unread: its client had gone at the last check, and nothing was waiting for its next chunk.
    """

    __slots__ = ("_context", "chunks", "is_unread")

    def __init__(self, context: StopSignal) -> None:
        self._context = context
        self.chunks: AsyncGenerator[Chunk, None] | None = None
        self.is_unread = False

    @property
    def is_waiting(self) -> bool:
        """Whether it has chunks, and nothing is waiting for the next one."""
        return self.chunks is not None and not self.chunks.ag_running  # type: ignore[attr-defined]  # all have it

    def check(self) -> bool:
        """Whether the round is unread now, and was at the last check. A round that is just ending is so only once."""
        was_unread = self.is_unread
        self.is_unread = self.is_waiting and self._context.is_stopped()
        return was_unread and self.is_unread


class RoundsInProgress(InBackground):
    """Counts the rounds, and closes the unread ones.

    Dynamo reads a handler's chunks one by one, and drops the handler when it finds that the client has gone. Where the
    frontend is behind, Dynamo waits for room in the connection. If the client goes then, Dynamo 1.4 stops the context,
    but neither reads nor drops the handler. Such a round would stay in progress for ever.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._rounds: set[RoundInProgress] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = SupervisedTask("unread-rounds", self._run)

    def __len__(self) -> int:
        return len(self._rounds)

    def enter(self, context: StopSignal) -> RoundInProgress:
        """A round begins."""
        round_ = RoundInProgress(context)
        self._rounds.add(round_)
        self._idle.clear()
        return round_

    def leave(self, round_: RoundInProgress) -> None:
        """A round has ended. It may have left before."""
        self._rounds.discard(round_)
        if not self._rounds:
            self._idle.set()

    async def drained(self) -> None:
        """Wait until there is none."""
        await self._idle.wait()

    async def close_unread(self) -> None:
        """Close the rounds that were unread at the last call and still are."""
        unread = [round_ for round_ in self._rounds if round_.check()]
        # Each in a task of its own, because the trace of a round is a context variable.
        await asyncio.gather(*(asyncio.create_task(self._close(round_)) for round_ in unread))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.close_unread()

    async def _close(self, round_: RoundInProgress) -> None:
        if round_.chunks is None or not round_.is_waiting:
            return  # its reader has come back since the check
        try:
            await round_.chunks.aclose()
        except Exception:
            log.exception("a round that nothing reads could not be closed")
        self.leave(round_)
