"""A worker whose event loop or whose lease stands still ends itself; one that only waits for the machine does not."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.harness.graph import Graph, profile
from tests.harness.watched_worker import LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
async def worker(graph: Graph) -> str:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    lease = ("--lease-s", str(LIMIT_S / 2))
    worker_id = await graph.new_worker("decode", perf, *lease, module="tests.harness.watched_worker")
    return graph.processes[worker_id]


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGUSR1, "the event loop stood still"), (signal.SIGUSR2, "the renewal of the lease stood still")],
    ids=["loop", "lease"],
)
async def test_a_worker_that_stands_still_ends_itself(
    graph: Graph, worker: str, number: signal.Signals, what: str
) -> None:
    os.kill(graph.pid(worker), number)
    assert "exit code 1" in await graph.until_ended(worker)
    assert what in graph.log(worker)


@pytest.mark.parametrize("pause", [signal.SIGHUP, signal.SIGSTOP], ids=["held", "stopped"])
async def test_a_pause_of_the_whole_process_ends_no_worker(graph: Graph, worker: str, pause: signal.Signals) -> None:
    os.kill(graph.pid(worker), pause)
    await graph.until_views(lambda views: not views)
    await asyncio.sleep(LIMIT_S)  # its lease has run out before
    os.kill(graph.pid(worker), signal.SIGCONT)
    await graph.until_workers(1)
    await graph.end(worker)
    assert "stood still" not in graph.log(worker)
