"""A task that waits for Redis ends when it is cancelled, whenever that happens."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from ampd.state.connect import open_store
from ampd.state.embedded import EmbeddedRedis
from ampd.state.store import StateStore, StateUnavailableError


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


async def _ask_until(over: asyncio.Event, store: StateStore) -> None:
    while not over.is_set():
        await store.snapshot()


@pytest.mark.parametrize("turns", range(16))
async def test_a_cancelled_task_ends(redis_url: str, turns: int) -> None:
    """After so many turns of the loop: from before the command is sent to after its answer."""
    for _ in range(4):
        store, over = await open_store(redis_url, "t"), asyncio.Event()
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


async def _ask_for_ever(over: asyncio.Event, store: StateStore) -> None:
    while not over.is_set():
        try:
            await store.snapshot()
        except StateUnavailableError:
            await asyncio.sleep(0.2)


async def test_a_task_that_is_cancelled_while_redis_goes_ends() -> None:
    """All pods of a graph that is deleted are told to end at once, their Redis included."""
    chance = random.Random(0)
    with EmbeddedRedis() as redis:
        for _ in range(24):
            store, over = await open_store(redis.url, "t"), asyncio.Event()
            try:
                task = asyncio.create_task(_ask_for_ever(over, store))
                await asyncio.sleep(0.01 + 0.005 * chance.random())
                assert redis.pid
                os.kill(redis.pid, signal.SIGKILL)
                await asyncio.sleep(0.002 * chance.random())
                task.cancel()
                await asyncio.wait({task}, timeout=2.0)
                over.set()
                await asyncio.wait({task})
                assert task.cancelled(), "the cancellation was lost"
            finally:
                await store.close()
                redis.stop()
                redis.start()
