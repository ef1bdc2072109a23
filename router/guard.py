"""Gives up calls to workers that hang: a stream that is silent while its worker has left the view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ampd.state.view import ClusterView
from router.calls import CallContext


class Stream:
    """A call in progress. Set `seen_s` at each sign of life."""

    __slots__ = ("context", "seen_s", "worker_id")

    def __init__(self, worker_id: str, context: CallContext, now_s: float) -> None:
        self.worker_id = worker_id
        self.context = context
        self.seen_s = now_s


class StreamGuard:
    """Watches the calls in progress.

    A worker that was killed closes its connections, and its calls fail at once. One that hangs keeps them open: its
    lease runs out, and a call that has been silent for as long is stopped, so that the round can go on elsewhere.
    """

    def __init__(
        self, view: ClusterView, patience_s: float, interval_s: float = 0.5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._view = view
        self._patience_s = patience_s
        self._interval_s = interval_s
        self._clock = clock
        self._streams: set[Stream] = set()

    @contextmanager
    def watch(self, worker_id: str, context: CallContext) -> Iterator[Stream]:
        """Watch a call while the block runs."""
        stream = Stream(worker_id, context, self._clock())
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def run(self) -> None:
        """Look at all calls, for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.check()

    def check(self) -> None:
        """Stop the calls that are silent and whose worker is gone."""
        horizon_s = self._clock() - self._patience_s
        for stream in self._streams:
            if stream.seen_s <= horizon_s and self._view.worker(stream.worker_id) is None:
                stream.context.stop_generating()
