"""A worker that the machine does not let run for a while is late, and nothing else."""

import asyncio
import os
import signal

import httpx
import pytest

from tests.harness.graph import Graph, completion, profile, record
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

DYNAMO_WAITS_S = 5.0
"""In which Dynamo wants calls to be acknowledged, unless it is told otherwise."""


@pytest.mark.long
async def test_a_worker_that_acknowledges_late_is_not_left_out(graph: Graph) -> None:
    lease = ("--lease-s", "60")
    coordinator = graph.start_coordinator("always-local", *lease)
    graph.start_frontend()
    steady = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.01)
    only = await graph.new_worker("decode", steady, *lease)
    await graph.until_answers([coordinator])
    pid = graph.pid(graph.processes[only])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        os.kill(pid, signal.SIGSTOP)
        try:
            asked = asyncio.create_task(client.post("/v1/completions", json=completion([9] * 40, max_tokens=5)))
            await asyncio.sleep(DYNAMO_WAITS_S + 1.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        reply = await asked
    assert reply.status_code == 200, reply.text
    assert record(reply.json())["retries"] == 0
