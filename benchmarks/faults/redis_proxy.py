"""A TCP proxy before Redis, which can delay every answer and lead new connections to another server."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from benchmarks.faults.redis_server import PASSWORD, USER
from tests.harness.tcp_proxy import TcpProxy


class RedisProxy(TcpProxy):
    """One address for whichever server is the master."""

    @property
    def url(self) -> str:
        return f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # no server: the client sees a connection that ends at once
            await super()._serve(reader, writer)
