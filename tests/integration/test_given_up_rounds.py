"""A coordinator that is told to end gives up the rounds that take longer than it may: another one goes on with them."""

import httpx
import pytest

from tests.harness.graph import Graph, completion, events, profile
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5 + position % 300 for position in range(60)]


async def test_a_round_that_is_given_up_goes_on_at_another_coordinator(graph: Graph) -> None:
    """The round takes ten minutes, and the coordinator has a second. Nobody kills it."""
    graph.environment.update(DYN_LOG="warn,router=info")
    leaving = graph.start_coordinator("always-local", "--drain-s", "1")
    graph.start_frontend(coordinators=2)
    await graph.new_worker("decode", profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.1))
    await graph.until_answers([leaving])
    body = completion(PROMPT, max_tokens=6000, stream=True)
    async with (
        httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        chunks = events(reply)
        await anext(chunks)
        staying = graph.start_coordinator("always-local")
        # The frontend knows it only some time after it is registered.
        while "round finished" not in graph.log(staying):
            await graph.until_answers([staying])
        await graph.end(leaving)
        assert "exit code 0" in graph.supervisor.ended()[leaving]
        assert "rounds still in progress after 1 s are given up" in graph.log(leaving)
        # More than could have been under way when it ended.
        seen = [await anext(chunks) for _ in range(20)]
        assert not any(event.get("error") for event in seen)
        assert staying not in graph.supervisor.ended()
