"""The samples of a soak's processes."""

import asyncio
from pathlib import Path

import pytest

from ampd.fork_server import ForkServer
from benchmarks.faults.cluster import LiveGraph
from benchmarks.faults.redis_proxy import RedisProxy
from benchmarks.faults.redis_server import FaultyRedis
from benchmarks.soak.sampling import REDIS, Sampler
from tests.waiting import until


async def _fail_after_a_sample(sampler: Sampler) -> None:
    async with sampler:
        await until(lambda: sampler.series)
        raise RuntimeError("the soak failed")


async def test_no_task_is_left_after_an_exception(tmp_path: Path) -> None:
    with FaultyRedis() as redis, ForkServer(()) as server:
        graph = LiveGraph(tmp_path, server, redis, RedisProxy(redis.port))
        sampler, before = Sampler(graph, 60.0, None), asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="the soak failed"):
            await _fail_after_a_sample(sampler)
        assert asyncio.all_tasks() == before
    assert {process for process, _ in sampler.series} == {REDIS}
