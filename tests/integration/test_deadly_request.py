"""A request that ends every worker which takes it, in a whole graph."""

import httpx
import pytest

from tests.harness.graph import SHORT_LEASE, Graph, chat, completion, profile
from tests.harness.mortal_worker import DEADLY_TOKEN
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.long
async def test_a_request_ends_at_most_two_workers(graph: Graph) -> None:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.002)
    coordinators = [graph.start_coordinator("always-remote") for _ in range(2)]
    graph.start_frontend()
    for role in ("prefill", "prefill", "decode", "decode"):
        await graph.new_worker(role, perf, *SHORT_LEASE, module="tests.harness.mortal_worker")
    await graph.until_answers(coordinators)
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        foreign = chat([{"role": "user", "content": "hello"}], max_tokens=4, min_tokens=2, stop_token_ids=[999_999_999])
        reply = await client.post("/v1/chat/completions", json=foreign)
        assert reply.status_code == 400, reply.text
        assert "token id 999999999 in stop_token_ids is not in this model's vocabulary" in reply.text
        deadly = completion([5, 6, DEADLY_TOKEN, *range(100, 150)], max_tokens=4)
        assert (await client.post("/v1/completions", json=deadly)).status_code == 500
        for _ in range(4):
            assert (await client.post("/v1/completions", json=deadly)).status_code == 500
        await graph.until_workers(2)
        harmless = await client.post("/v1/completions", json=completion([5, 6, *range(100, 150)], max_tokens=4))
        assert harmless.status_code == 200, harmless.text
    # Dynamo's frontend does not pass the line on for completions.
    for coordinator in coordinators:
        refused = [
            line for line in graph.log(coordinator).splitlines() if "workers died 2 times while they ran this" in line
        ]
        assert refused
