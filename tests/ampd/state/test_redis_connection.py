"""A task that waits for Redis ends when it is cancelled, whenever that happens."""

import asyncio
import os
import random
import signal

import pytest
import uvloop

from ampd.state.embedded import EmbeddedRedis
from ampd.state.redis_store import StateStore, open_store
from ampd.state.store import StateUnavailableError
from tests.harness.tcp_redis import TcpRedis
from tests.waiting import PATIENCE_S


async def _ask_until(over: asyncio.Event, store: StateStore) -> None:
    while not over.is_set():
        await store.snapshot()


@pytest.mark.parametrize("turns", range(16))
async def test_a_cancelled_task_ends(redis_server: TcpRedis, turns: int) -> None:
    """After this many turns of the loop: from before the command is sent to after its answer."""
    for _ in range(4):
        store, over = await open_store(redis_server.url, "t", timeout_s=PATIENCE_S), asyncio.Event()
        try:
            task = asyncio.create_task(_ask_until(over, store))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=2.0)
            over.set()
            await asyncio.wait({task})
            assert task.cancelled(), "the cancellation was lost"
        finally:
            await store.close()


async def _ask_for_ever(over: asyncio.Event, answered: asyncio.Event, store: StateStore) -> None:
    while not over.is_set():
        try:
            await store.snapshot()
            answered.set()
        except StateUnavailableError:
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_task_that_is_cancelled_while_redis_goes_ends() -> None:
    """A graph that is deleted ends all its pods at once, its Redis included."""
    chance = random.Random(0)
    with EmbeddedRedis() as redis:
        for _ in range(24):
            store, over, answered = await open_store(redis.url, "t"), asyncio.Event(), asyncio.Event()
            try:
                task = asyncio.create_task(_ask_for_ever(over, answered, store))
                await answered.wait()
                assert redis.pid
                os.kill(redis.pid, signal.SIGKILL)
                for _ in range(chance.randrange(60)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task}, timeout=2.0)
                over.set()
                await asyncio.wait({task})
                assert task.cancelled(), "the cancellation was lost"
            finally:
                await store.close()
                redis.stop()
                redis.start()


def test_a_command_is_sent_again_where_uvloop_has_closed_its_connection(redis_server: TcpRedis) -> None:
    """As after a reset. redis-py still counts such a connection as connected."""

    async def run() -> None:
        store = StateStore(redis_server.tcp_url, "reset")
        await store.ping()
        store._connection._idle[-1]._writer.transport.abort()
        await store.ping()
        await store.close()

    uvloop.run(run())
