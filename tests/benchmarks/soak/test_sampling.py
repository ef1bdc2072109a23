"""The samples of a soak's processes."""

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.faults.cluster import KINDS, PAIR, LiveGraph, Member
from benchmarks.faults.redis_proxy import RedisProxy
from benchmarks.faults.redis_server import FaultyRedis
from benchmarks.soak import sampling
from benchmarks.soak.sampling import REDIS, Sampler
from benchmarks.soak.trend import NIXL_PEERS, UNSETTLED
from tests.harness.fork_server import ForkServer
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


class Process:
    """One that runs until it is told otherwise."""

    status: int | None = None

    def poll(self) -> int | None:
        return self.status


def member(graph: LiveGraph, name: str) -> Member:
    unused = cast("Any", None)
    made = Member(name, name.rpartition("-")[0], cast("Any", Process()), unused, unused, graph.model, is_ready=True)
    graph.members.append(made)
    return made


def test_connections_count_only_a_while_after_the_usual_processes_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    unused = cast("Any", None)
    graph = LiveGraph(tmp_path, unused, unused, unused)
    members = [member(graph, f"{kind}-{number}") for kind in KINDS for number in range(PAIR)]
    sampler = Sampler(graph, 60.0, None)

    def is_settled_after(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return sampler.is_settled()

    def figure() -> str:
        sampler.series.clear()
        sampler._add("decode-0", {"sockets": 35.0, "threads": 9.0})
        assert ("decode-0", "threads") in sampler.series
        return next(name for _, name in sampler.series if name.startswith("sockets"))

    assert not is_settled_after(0.0)
    assert is_settled_after(sampling.SETTLED_S)
    assert figure() == "sockets"
    cast("Any", members[0].process).status = -9
    assert not is_settled_after(60.0), "one is missing"
    assert figure() == f"sockets{UNSETTLED}"
    started = member(graph, "prefill-8")
    started.is_ready = False
    assert not is_settled_after(60.0), "it runs and does not serve yet"
    started.is_ready = True
    assert not is_settled_after(60.0), "the others are not connected with it yet"
    assert is_settled_after(sampling.SETTLED_S)
    member(graph, "decode-9")
    assert not is_settled_after(60.0), "one more than at the start"
    assert not is_settled_after(60.0)


def test_peers_count_as_too_many_beyond_the_workers_that_ran_lately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    unused = cast("Any", None)
    graph = LiveGraph(tmp_path, unused, unused, unused)
    first, second, third = (member(graph, name) for name in ("prefill-0", "decode-1", "decode-2"))
    sampler = Sampler(graph, 5.0, None)

    def beyond(peers: float) -> float:
        sampler._note_workers()
        sampler._add(first.name, {NIXL_PEERS: peers})
        return sampler.series[first.name, sampling.NIXL_PEERS_BEYOND][-1][1]

    assert beyond(2.0) == 0.0
    assert beyond(3.0) == 1.0
    cast("Any", third.process).status = -9
    member(graph, "decode-3")
    now_s += 30.0
    assert beyond(3.0) == 0.0, "the worker that has ended may still be known"
    cast("Any", second.process).status = -9
    member(graph, "decode-4")
    now_s += 1000.0
    assert beyond(4.0) == 1.0, "never more than two and the one that it replaced"
