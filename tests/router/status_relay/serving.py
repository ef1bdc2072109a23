"""Servers of aiohttp for the time of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from router.status_relay.relay import HEALTH_PATH, Relay


@asynccontextmanager
async def serving(runner: web.AppRunner) -> AsyncIterator[str]:
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that says nothing yet."""
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@asynccontextmanager
async def client_of_relay(
    frontend: web.AppRunner, health_path: str = HEALTH_PATH
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a relay that stands before the frontend."""
    async with (
        serving(frontend) as behind,
        serving(Relay(behind, health_path=health_path).runner()) as url,
        aiohttp.ClientSession(url, max_field_size=1 << 20) as client,
    ):
        yield client
