"""The worker's connections to the ranks of its engine, one socket per rank."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from zmq import LINGER, NOBLOCK, PAIR, RCVHWM, SNDHWM, Again
from zmq.asyncio import Context

from ampd.supervised_task import SupervisedTask
from workers.kv.rank_messages import (
    Allow,
    Done,
    Drop,
    Hello,
    Records,
    Refused,
    Settle,
    ToRank,
    ToWorker,
    decode_to_worker,
    encode,
)

CALL_TIMEOUT_S = 30.0
"""A rank that copies for a forward pass answers after the pass, and passes of long prefills take seconds on a GPU."""


class RankLinks:
    """Sends to all ranks of an engine, and receives from them.

    The sockets' files lie in a private directory, which is removed as soon as all ranks are connected.

    Args:
        ranks: of the engine.
        on_message: called with the rank and each message that is not the answer to a call.

    Attributes:
        refusal: why a rank cannot exchange the KV of its engine, in one line; empty: none has refused it.
    """

    def __init__(self, ranks: int, on_message: Callable[[int, ToWorker], None]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ampd-kv-"))
        self.addresses = [f"ipc://{self._directory}/rank-{rank}" for rank in range(ranks)]
        self._context = Context()
        self._sockets = []
        for address in self.addresses:
            socket = self._context.socket(PAIR)
            for option, value in ((LINGER, 0), (SNDHWM, 0), (RCVHWM, 0)):
                socket.setsockopt(option, value)
            socket.bind(address)
            self._sockets.append(socket)
        self._calls = count(1)
        self._waiting: dict[tuple[int, int], asyncio.Future[Done]] = {}
        loop = asyncio.get_running_loop()
        self._hellos: list[asyncio.Future[Hello]] = [loop.create_future() for _ in range(ranks)]
        self.refusal = ""
        self._on_message = on_message
        self._readers = [SupervisedTask(f"kv-rank-{rank}", partial(self._read, rank)) for rank in range(ranks)]
        for reader in self._readers:
            reader.start()

    async def hellos(self, timeout_s: float) -> list[Hello]:
        """The first message of each rank. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            hellos = [await asyncio.shield(hello) for hello in self._hellos]
        shutil.rmtree(self._directory, ignore_errors=True)
        return hellos

    def send(self, message: ToRank) -> None:
        """Send to all ranks, without waiting for an answer. A rank gets messages in the order of the calls.

        Raises:
            ConnectionError: one of the engine's processes has gone. Without it a send would wait for ever.
        """
        data = encode(message)
        for rank in range(len(self._sockets)):
            self._send(rank, data)

    async def allow(self, rid: str, records: dict[str, Records]) -> None:
        """Let a request load records. Returns when all ranks know it; raises as `call`."""
        await self._call_all(lambda call: Allow(call, rid, records), CALL_TIMEOUT_S)

    async def drop(self, rid: str) -> None:
        """A request loads nothing any more. Returns when no rank reads its records any more, however long that takes.

        Raises:
            ConnectionError: the engine has gone.
        """
        await self._call_all(lambda call: Drop(call, rid), None)

    async def offers(self) -> int:
        """How many offers SGLang has made so far; raises as `call`."""
        return (await self._call(0, Settle, CALL_TIMEOUT_S)).offers

    async def close(self) -> None:
        """End the connections and remove their files."""
        for reader in self._readers:
            await reader.stop()
        for hello in self._hellos:
            hello.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the engine's process has gone"))
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _call_all(self, message: Callable[[int], ToRank], timeout_s: float | None) -> None:
        await asyncio.gather(*(self._call(rank, message, timeout_s) for rank in range(len(self._sockets))))

    async def _call(self, rank: int, message: Callable[[int], ToRank], timeout_s: float | None) -> Done:
        """Call a rank. `timeout_s`: None: without a limit.

        Raises:
            TimeoutError: the rank's process does not answer.
            ConnectionError: it has gone.
        """
        call = next(self._calls)
        answer = self._waiting[rank, call] = asyncio.get_running_loop().create_future()
        try:
            self._send(rank, encode(message(call)))
            async with asyncio.timeout(timeout_s):
                done: Done = await answer
                return done
        finally:
            self._waiting.pop((rank, call), None)

    def _send(self, rank: int, data: bytes) -> None:
        try:
            # A send that does not wait has happened when it returns.
            sent: Any = self._sockets[rank].send(data, NOBLOCK)
            sent.result()
        except Again:
            raise ConnectionError("the engine's process has gone") from None

    async def _read(self, rank: int) -> None:
        while True:
            message = decode_to_worker(await self._sockets[rank].recv())
            match message:
                case Done(call):
                    answer = self._waiting.get((rank, call))
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case Refused(_, reason):
                    self.refusal = self.refusal or reason
                case Hello():
                    if not self._hellos[rank].done():
                        self._hellos[rank].set_result(message)
                case _:
                    self._on_message(rank, message)
