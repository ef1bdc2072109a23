"""A TCP proxy before Redis, which can delay every answer and lead new connections to another server."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from benchmarks.faults.redis_server import PASSWORD, USER
from tests.harness.tcp_proxy import TcpProxy


class RedisProxy(TcpProxy):
    """One address for whichever server is the master.

    Attributes:
        delay_s: added to each direction of the traffic; the rate of the traffic stays the same.
    """

    delay_s = 0.0

    @property
    def url(self) -> str:
        return f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # no server: the client sees a connection that ends at once
            await super()._serve(reader, writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(chunks, writer))
        try:
            with suppress(OSError):
                while chunk := await reader.read(1 << 16):
                    chunks.put_nowait((time.monotonic() + self.delay_s, chunk))
            await chunks.join()
        finally:
            sending.cancel()

    async def _send(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due_s, chunk = await chunks.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            with suppress(OSError):
                writer.write(chunk)
                await writer.drain()
            chunks.task_done()
