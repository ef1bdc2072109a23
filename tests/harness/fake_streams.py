"""Streams and events of a device that does its work whenever a test lets it, in any order that the events allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any


class FakeDevice:
    """In place of torch's module for a device. What computes runs on the stream of the thread, at once.

    Attributes:
        streams: all that were made.
        waited: the names of the threads that waited for an event.
        may_wait: until it is set, threads wait for it before they wait for an event. This thread never does.
    """

    def __init__(self) -> None:
        self.streams: list[Any] = []
        self.waited: list[str] = []
        self.may_wait = threading.Event()
        self.may_wait.set()
        self._owner = threading.current_thread()
        self.lock = threading.RLock()
        self._of_thread = threading.local()
        device = self

        class Stream:
            """Work in order: actions, and waits for events."""

            def __init__(self, priority: int = 0) -> None:
                self.priority = priority
                self.work: list[Callable[[], None] | Event] = []
                self.done = 0
                device.streams.append(self)

            def wait_event(self, event: Any) -> None:
                with device.lock:
                    self.work.append(event)

            @property
            def is_ready(self) -> bool:
                """Whether its next work may run."""
                if self.done == len(self.work):
                    return False
                ahead = self.work[self.done]
                return not isinstance(ahead, Event) or ahead.query()

            def run(self) -> None:
                """Do the next work, and what it waits for."""
                with device.lock:
                    ahead = self.work[self.done]
                    if isinstance(ahead, Event):
                        ahead.reach()
                    else:
                        ahead()
                    self.done += 1

        class Event:
            """A place in the work of a stream."""

            stream: Any = None
            at = 0

            def record(self, stream: Any = None) -> None:
                self.stream = stream or device.current_stream()
                self.at = len(getattr(self.stream, "work", ()))

            def query(self) -> bool:
                return self.at <= getattr(self.stream, "done", 0)

            def synchronize(self) -> None:
                device.waited.append(threading.current_thread().name)
                if threading.current_thread() is not device._owner:
                    device.may_wait.wait()
                self.reach()

            def reach(self) -> None:
                """Let the stream run up to here."""
                with device.lock:
                    while not self.query():
                        self.stream.run()

        self.Stream, self.Event = Stream, Event

    def current_stream(self) -> Any:
        """The stream of this thread."""
        return getattr(self._of_thread, "stream", None) or AtOnce()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """What is launched meanwhile goes to a stream."""
        before, self._of_thread.stream = getattr(self._of_thread, "stream", None), stream
        yield
        self._of_thread.stream = before

    def launch(self, _pipeline: Any, stream: Any, act: Callable[[], None]) -> None:
        """In place of `Pipeline.launch`."""
        with self.lock:
            stream.work.append(act)

    def run_all(self, rng: Random) -> None:
        """Do all work, in an order by chance that the events allow."""
        while ready := [stream for stream in self.streams if stream.is_ready]:
            rng.choice(ready).run()
        assert all(stream.done == len(stream.work) for stream in self.streams)


class AtOnce:
    """A stream on which all has happened when the call that begins it returns."""

    def wait_event(self, event: Any) -> None:
        """Wait at once."""
        event.reach()
