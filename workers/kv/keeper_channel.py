"""How the pin keeper's thread is reached: messages of the worker's process, and actions of the engine's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from zmq import LINGER, NOBLOCK, PAIR, POLLIN, RCVHWM, SNDHWM, Again, Context, Poller

from workers.kv.control import Message, pack, unpack


class KeeperChannel:
    """A socket to the worker and an inbox for actions; one wait covers both.

    `post` and `wake` may be called from any thread, everything else only from the keeper's.

    Args:
        address: the worker's control channel.
    """

    def __init__(self, address: str) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = Context()
        self._socket = self._context.socket(PAIR)
        self._socket.setsockopt(LINGER, 0)
        self._socket.setsockopt(SNDHWM, 0)
        self._socket.setsockopt(RCVHWM, 0)
        self._socket.connect(address)
        self._poller = Poller()
        self._poller.register(self._socket, POLLIN)
        self._poller.register(self._bell, POLLIN)

    def post(self, action: Callable[[], None]) -> None:
        """Let the keeper's thread run an action."""
        self._inbox.put(action)
        self.wake()

    def wake(self) -> None:
        """End the keeper's wait."""
        os.eventfd_write(self._bell, 1)

    def wait(self, timeout_ms: int) -> None:
        """Wait for a message, an action or `wake`."""
        self._poller.poll(timeout_ms)

    def run_actions(self) -> None:
        """Run the actions that were posted so far, in their order."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while True:
            try:
                action = self._inbox.get_nowait()
            except Empty:
                return
            action()

    def messages(self) -> Iterator[tuple[Message, list[bytes]]]:
        """The messages that have arrived, with their page keys."""
        while self._socket.poll(0):
            yield unpack(self._socket.recv_multipart())

    def send(self, message: Message, keys: Sequence[bytes] = ()) -> None:
        """Send a message to the worker; drop it if the worker has gone, because a send would wait for ever."""
        with suppress(Again):
            self._socket.send_multipart(pack(message, keys), NOBLOCK)

    def close(self) -> None:
        """Release sockets and files, after the keeper's thread has ended."""
        self._socket.close(0)
        self._context.term()
        os.close(self._bell)
