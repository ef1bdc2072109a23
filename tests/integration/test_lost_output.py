"""A round that fails within its output, without a stream: the client gets the status and the reason.

The other worker is too small for the round, so it cannot go on there.
"""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from ampd.types import WorkerView
from tests.harness.graph import HELLO, SHORT_LEASE, Graph, chat, completion, profile
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONTEXT_TOKENS = 128
SMALL = ("--max-context-tokens", str(CONTEXT_TOKENS), "--kv-capacity-tokens", "256")
LONG = {"max_tokens": 6000, "ignore_eos": True}


async def test_a_round_that_is_lost_within_its_output_ends_with_the_reason(graph: Graph) -> None:
    graph.start_coordinator("always-local")
    graph.start_frontend()
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.02)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat(HELLO, **LONG),
        "/v1/completions": completion([5 + position for position in range(60)], **LONG),
    }
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        worker = await graph.new_worker("decode", perf, *SHORT_LEASE)
        for path in bodies:
            await served(client, path, {**bodies[path], "max_tokens": 2})
        asking = [asyncio.create_task(client.post(path, json=body)) for path, body in bodies.items()]
        await graph.until_views(has_grown)
        await graph.new_worker("decode", perf, *SHORT_LEASE, *SMALL)
        await graph.end(graph.processes[worker], signal.SIGKILL)
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 503, answer.text
            assert answer.json()["message"].startswith(
                "its worker was lost, and no other one can go on: prompt is too long"
            )


def has_grown(views: list[WorkerView]) -> bool:
    """Whether each of two rounds has more tokens than the small worker takes."""
    return any(view.decode_batch == 2 and view.decode_context_tokens > 4 * CONTEXT_TOKENS for view in views)


async def served(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Wait until the frontend knows the model."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await client.post(path, json=body)).is_success:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
