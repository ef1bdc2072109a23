"""A TCP proxy in the test's event loop, which can lead new connections elsewhere."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self


class TcpProxy:
    """Listens on a free port of 127.0.0.1 while the context is open.

    Attributes:
        target_port: where new connections lead; open ones stay where they are.
        delay_s: added to each direction of the traffic; the rate of the traffic stays the same.
        may_answer: while it is not set, nothing goes back to the clients.
    """

    delay_s = 0.0

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        # A connection that was accepted before may be handed over only while the others end.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        # Not in `_serve`: a task that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: writer.close())
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends, copies = [writer], set[asyncio.Task[None]]()
        self._clients.add(writer)
        try:
            port, begun = await self._lead(reader)
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
            ends.append(back_writer)
            back_writer.write(begun)
            copies = {
                asyncio.create_task(self._copy(reader, back_writer, writer)),
                asyncio.create_task(self._copy(back_reader, writer, writer)),
            }
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._clients.discard(writer)
            for copy in copies:
                copy.cancel()
            for end in ends:
                end.close()
                with suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()

    async def _lead(self, _reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Where a new connection leads, and what was read of it to find that out."""
        return self.target_port, b""

    def _passed(self, client: asyncio.StreamWriter, data: bytes, *, is_answer: bool) -> None:
        """Data of a client's connection go on now, b"" at its end."""

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def deliver() -> None:
            while True:
                at_s, data = await late.get()
                if (left_s := at_s - clock()) > 0:
                    await asyncio.sleep(left_s)
                if writer in self._clients:
                    await self.may_answer.wait()
                self._passed(client, data, is_answer=writer is client)
                if not data:
                    return
                with suppress(OSError):
                    writer.write(data)
                    await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    late.put_nowait((clock() + self.delay_s, data))
            late.put_nowait((clock() + self.delay_s, b""))
