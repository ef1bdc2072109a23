"""The channel between a worker and the linker inside its engine's scheduler process.

A message is a JSON object and one frame of bytes with the page keys. The worker's calls are answered by number. The
linker also reports on its own how much sessions hold. The socket's file lies in a private directory, which is removed
as soon as both sides are connected.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from zmq import LINGER, NOBLOCK, PAIR, RCVHWM, SNDHWM, Again
from zmq.asyncio import Context

from ampd.page_keys import KEY_BYTES
from ampd.supervised_task import SupervisedTask

Message = dict[str, Any]


def pack(message: Message, keys: Sequence[bytes] = ()) -> list[bytes]:
    """A message as frames."""
    return [json.dumps(message).encode(), b"".join(keys)]


def unpack(frames: Sequence[bytes]) -> tuple[Message, list[bytes]]:
    """Frames as a message and its page keys."""
    head, body = frames
    return json.loads(head), [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]


class ControlLink:
    """The worker's end.

    Args:
        on_event: called with each message that is not an answer.
    """

    def __init__(self, on_event: Callable[[Message], None]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ampd-kv-"))
        self.address = f"ipc://{self._directory}/control"
        self._context = Context()
        self._socket = self._context.socket(PAIR)
        self._socket.setsockopt(LINGER, 0)
        self._socket.setsockopt(SNDHWM, 0)
        self._socket.setsockopt(RCVHWM, 0)
        self._socket.bind(self.address)
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._hello: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._reader = SupervisedTask("kv-control", self._read)
        self._reader.start()

    async def hello(self, timeout_s: float) -> Message:
        """The linker's first message. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            message: Message = await asyncio.shield(self._hello)
        shutil.rmtree(self._directory, ignore_errors=True)
        return message

    async def send(self, message: Message, keys: Sequence[bytes] = ()) -> None:
        """Send without waiting for an answer; messages arrive in the order of the calls.

        Raises:
            ConnectionError: the engine's process has gone. Without it a send would wait for ever.
        """
        try:
            await self._socket.send_multipart(pack(message, keys), NOBLOCK)
        except Again:
            raise ConnectionError("the engine's process has gone") from None

    async def call(self, message: Message, keys: Sequence[bytes] = (), timeout_s: float = 5.0) -> Message:
        """Send and wait.

        Raises:
            TimeoutError: the engine's process does not answer.
            ConnectionError: it has gone.
            RuntimeError: it failed.
        """
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send({**message, "id": number}, keys)
            async with asyncio.timeout(timeout_s):
                reply: Message = await answer
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    async def _read(self) -> None:
        while True:
            message, _ = unpack(await self._socket.recv_multipart())
            if "re" in message:
                answer = self._waiting.get(message["re"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif message.get("event") == "hello":
                if not self._hello.done():
                    self._hello.set_result(message)
            else:
                self._on_event(message)

    async def close(self) -> None:
        """End the channel and remove its files."""
        await self._reader.stop()
        self._hello.cancel()
        self._socket.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)
