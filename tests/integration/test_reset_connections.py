"""The network resets connections between processes that all live: no round fails, and no worker counts as lost."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from ampd.state.embedded import EmbeddedRedis
from tests.harness.connections import reset_accepted
from tests.harness.fork_server import ForkServer
from tests.harness.graph import Graph, ask, empty_graph, profile

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ROUNDS = 8
_FIRST_TOKENS = iter(range(5, 299))


async def _rounds(client: httpx.AsyncClient) -> list[str]:
    """Rounds of new sessions, side by side; returns their routes."""
    prompts = [[next(_FIRST_TOKENS)] * 40 for _ in range(ROUNDS)]
    answers = await asyncio.gather(*(ask(client, prompt, f"s{prompt[0]}") for prompt in prompts))
    return [record["route"] for _, record in answers]


async def _reset(graph: Graph, names: Sequence[str], client: httpx.AsyncClient) -> None:
    for _ in range(2):
        for name in names:
            served = graph.log(name).count("round finished")
            assert reset_accepted(graph.pid(name)), f"{name} had no connection"
            await _rounds(client)
            while name.startswith("coordinator") and graph.log(name).count("round finished") == served:
                await _rounds(client)


@pytest.mark.parametrize("number", [1, 2])
async def test_no_round_fails_if_connections_to_workers_or_coordinators_are_reset(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer, number: int
) -> None:
    """With one worker of each role, where no other can stand in."""
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        graph.environment.update(DYN_LOG="warn,router=info")
        coordinators = [graph.start_coordinator("always-remote") for _ in range(number)]
        graph.start_frontend(coordinators=number)
        fast = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.005)
        for role in ("prefill", "decode"):
            await graph.new_worker(role, fast)
        await graph.until_answers(coordinators)
        async with httpx.AsyncClient(base_url=graph.url, timeout=60) as client:
            while not all("round finished" in graph.log(name) for name in coordinators):
                assert set(await _rounds(client)) == {"remote"}
            await _reset(graph, [*graph.processes.values(), *coordinators], client)
        for name in coordinators:
            assert "out of discovery" not in graph.log(name)
            assert "failed, going on locally" not in graph.log(name)
