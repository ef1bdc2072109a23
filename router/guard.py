"""Gives up calls to workers that hang: the stream is silent and the worker has left the view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ampd.background_tasks import InBackground, SupervisedTask
from ampd.state.view import ClusterView
from router.calls import CallContext
from router.round_errors import WorkerLostError


class Stream:
    """A call in progress, which the current task reads. `answered` marks each sign of life."""

    __slots__ = ("_clock", "_task", "context", "has_died", "seen_s", "was_given_up", "was_stopped", "worker_id")

    def __init__(self, worker_id: str, context: CallContext, clock: Callable[[], float]) -> None:
        self.worker_id = worker_id
        self.context = context
        self.was_given_up = False
        self.has_died = False
        self.was_stopped = False
        self._clock = clock
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self.answered()

    def answered(self) -> None:
        """The worker has answered now."""
        self.seen_s = self._clock()

    @property
    def is_stopped(self) -> bool:
        """Whether the call was stopped, because the client has gone."""
        return self.context.is_stopped()

    def give_up(self, *, has_died: bool) -> None:
        """End the wait. Stopping the call alone is not enough, because a worker that hangs does not react."""
        self.was_given_up = True
        self.has_died = has_died
        self.was_stopped = self.is_stopped
        self.context.stop_generating()
        if self._task is not None:
            self._task.cancel()


class StreamGuard(InBackground):
    """Watches the calls in progress.

    A worker that is only suspect, because another call to it failed, is not given up. Neither is one that has left the
    shared state to finish its rounds, as long as it answers the lease probe.

    A worker that was killed closes its connections, and the calls that it has begun to answer fail at once. One that
    hangs keeps them open: its lease runs out, and a call that has been silent for as long is given up, so that the
    round can go on elsewhere. So is a call that reached a worker just before it was killed, because the connection of
    its answer was not there yet. A call that is as silent after its client has gone is given up too: Dynamo can lose
    the end of a stopped stream.

    While the shared state is lost, one missed probe is all that is known of such a worker. It may only be busy, so that
    its call is given up, but does not count as a death under its request.
    """

    def __init__(
        self, view: ClusterView, silent_s: float, interval_s: float = 0.1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._view = view
        self._silent_s = silent_s
        self._interval_s = interval_s
        self._clock = clock
        self._streams: set[Stream] = set()
        self._task = SupervisedTask("stream-guard", self._run)

    @contextmanager
    def watch(self, worker_id: str, context: CallContext) -> Iterator[Stream]:
        """Watch a call while the block runs.

        Raises:
            WorkerLostError: the call was given up.
        """
        stream = Stream(worker_id, context, self._clock)
        self._streams.add(stream)
        try:
            yield stream
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not stream.was_given_up or (task is not None and task.uncancel()):
                raise
            if stream.was_stopped:
                raise WorkerLostError(worker_id, "silent after its client has gone") from None
            raise WorkerLostError(worker_id, "silent, and its lease has run out", has_died=stream.has_died) from None
        finally:
            self._streams.discard(stream)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.check()

    def check(self) -> None:
        """Give up the calls that are silent and whose worker or client is gone."""
        horizon_s = self._clock() - self._silent_s
        for stream in list(self._streams):
            if stream.was_given_up:
                continue  # a second cancellation would end what the task does about the first
            if stream.seen_s <= horizon_s and (stream.is_stopped or not self._view.lives(stream.worker_id)):
                stream.give_up(has_died=self._view.connected)
