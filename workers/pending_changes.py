"""The changes of a worker that its publisher has not written to the shared state yet."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable

from ampd.state.known_worker import QUEUE_GRACE_S

_MOST_REPORTED = 500


class PendingChanges:
    """Collects changes. None of the reporting methods waits.

    Attributes:
        held_tokens: session id -> tokens of its context whose KV this worker holds.
    """

    def __init__(self) -> None:
        self.held_tokens: dict[str, int] = {}
        self._finished: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._is_sampled = False

    # -- reports of the worker's parts

    def changed(self) -> None:
        """The queue, the batch or the KV changed."""
        self._changed.set()

    def sampled(self) -> None:
        """A latency window or a context grew."""
        self._is_sampled = True

    def held(self, session_id: str, tokens: int, *, is_running: bool = False) -> None:
        """This worker now holds `tokens` of a session's context; 0: none any more.

        Args:
            is_running: a round of the session runs here. Its KV grows page by page, and no decision uses that before
                the round ends, which is a change of its own. So growth counts as a sample.
        """
        before = self.held_tokens.get(session_id, 0)
        if before == tokens:
            return
        if tokens:
            self.held_tokens[session_id] = tokens
        else:
            self.held_tokens.pop(session_id, None)
        if is_running and 0 < before < tokens:
            self.sampled()
        else:
            self._changed.set()

    def finished(self, task_id: str) -> None:
        """A prefill has left this worker's queue."""
        self._finished[task_id] = time.monotonic()
        self._drop_old()
        self._changed.set()

    # -- the publisher's side

    @property
    def has_samples(self) -> bool:
        """Whether there are new samples."""
        return self._is_sampled

    def finished_tasks(self) -> list[str]:
        """Prefills that have left the queue, oldest first, as many as one write may report.

        Those that left it longer than the grace ago are forgotten, because readers have dropped them by themselves.
        """
        self._drop_old()
        return list(itertools.islice(self._finished, _MOST_REPORTED))

    def forget_finished(self, task_ids: Iterable[str]) -> None:
        """The shared state knows that these prefills have finished. Any others are still to be reported."""
        for task_id in task_ids:
            self._finished.pop(task_id, None)
        if self._finished:
            self._changed.set()

    async def wait_changed(self, timeout_s: float) -> bool:
        """Wait for a change, at most for `timeout_s`. Returns whether there is one."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def clear(self) -> None:
        """Begin a publication: the changes and samples so far are part of it."""
        self._is_sampled = False
        self._changed.clear()

    def _drop_old(self) -> None:
        horizon_s = time.monotonic() - QUEUE_GRACE_S
        while self._finished and (oldest := next(iter(self._finished.items())))[1] < horizon_s:
            del self._finished[oldest[0]]
