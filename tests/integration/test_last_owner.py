"""The last worker that owns sessions is lost, and prefill workers are left."""

import signal
import uuid

import httpx
import pytest

from ampd.types import Role
from tests.harness.graph import Graph, ask, profile
from tests.harness.scripted_roles import assign, role_flags
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_a_prefill_worker_becomes_a_decode_worker_and_rounds_go_on(graph: Graph) -> None:
    """Although the policy wants no change, as one that rests or still computes."""
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.005)
    prefill = {await graph.new_worker("prefill", perf) for _ in range(2)}
    decode = await graph.new_worker("decode", perf)
    graph.start_frontend()
    assign(graph)
    name = graph.start_coordinator("predictive", *role_flags(graph), module="tests.harness.scripted_coordinator")
    await graph.until_answers([name])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        _, made = await ask(client, [5] * 40, uuid.uuid4().hex)
        assert made["decode_worker"] == decode
        await graph.end(graph.processes[decode], signal.SIGKILL)
        await graph.until_views(lambda views: {view.worker_id for view in views if view.role is Role.DECODE} & prefill)
        await graph.until_answers([name])
        _, made = await ask(client, [5] * 40, uuid.uuid4().hex)
        assert made["decode_worker"] in prefill
