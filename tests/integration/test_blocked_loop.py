"""A process whose event loop is blocked is noticed by its liveness probe, and ended."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from ampd.cli.serve.graph import system_environment, system_url
from ampd.cli.serve.processes import LivenessProbe
from ampd.telemetry.metrics.exposition import LIVENESS_PATH
from tests.harness.graph import Graph, completion, profile
from tests.harness.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

HOST = "127.0.0.1"
UNWATCHED = ("--lease-s", "600")
"""The worker does not end itself before the probe ends it."""
DEADLY_TOKENS = 500
"""As in `tests.harness.hanging_policies`. Only the graph's processes import that, because it registers its policies."""


@pytest.mark.parametrize("blocked", ["coordinator", "worker"])
async def test_the_probe_notices_a_blocked_loop_and_dynamos_live_does_not(graph: Graph, blocked: str) -> None:
    coordinator_port, worker_port = free_ports(2)
    urls = {"coordinator": system_url(HOST, coordinator_port), "worker": system_url(HOST, worker_port)}
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    graph.environment |= {"AMPD_POLICY_MODULES": "tests.harness.hanging_policies"}
    graph.environment |= system_environment(HOST, coordinator_port)
    names = {"coordinator": graph.start_coordinator("hanging" if blocked == "coordinator" else "always-local")}
    graph.environment |= system_environment(HOST, worker_port)
    slicing = "hanging" if blocked == "worker" else "whole"
    worker_id = await graph.new_worker("decode", perf, "--slicing", slicing, *UNWATCHED)
    names["worker"] = graph.processes[worker_id]
    graph.environment |= system_environment(HOST, None)
    frontend = graph.start_frontend()
    await graph.until_answers([names["coordinator"]])

    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        for url in urls.values():
            assert (await client.get(url + LIVENESS_PATH)).status_code == 200
        prompt = completion(list(range(64, 64 + 100)) * (DEADLY_TOKENS // 100), max_tokens=2)
        hanging = asyncio.create_task(client.post(f"{graph.url}/v1/completions", json=prompt))
        try:
            await until(lambda: _hangs(client, urls[blocked]))
            assert (await client.get(f"{urls[blocked]}/live")).status_code == 200, "its own threads answer"
            (other,) = urls.keys() - {blocked}
            assert (await client.get(urls[other] + LIVENESS_PATH)).status_code == 200

            lines: list[str] = []
            probe = LivenessProbe({names[blocked]: urls[blocked] + LIVENESS_PATH}, 0.01, timeout_s=1.0, failures=3)
            probing = asyncio.create_task(probe.end_hanging(graph.supervisor, lines.append))
            try:
                assert "exit code -9" in await graph.until_ended(names[blocked])
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
            assert "3 times; it is ended" in lines[0]
        finally:
            hanging.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
                await hanging
    for name in (names[other], frontend):
        await graph.end(name)


async def _hangs(client: httpx.AsyncClient, url: str) -> bool:
    """Whether the event loop does not answer, at all of several tries, so that it is no busy moment."""
    try:
        await client.get(url + LIVENESS_PATH, timeout=3.0)
    except httpx.TimeoutException:
        return True
    return False
