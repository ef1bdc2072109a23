"""Processes whose entries in discovery were deleted, as after a standstill of theirs, enter again and serve.

Each test has a graph of its own.
"""

from pathlib import Path

import httpx
import pytest

from ampd.state.embedded import EmbeddedRedis
from tests.harness.fork_server import ForkServer
from tests.harness.graph import MODEL, Graph, completion, empty_graph, profile, record, session
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def perf_of(graph: Graph) -> Path:
    return profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.002)


async def delete_card(graph: Graph) -> None:
    """As the other processes do when this coordinator stands still."""
    cards: list[Path] = []

    def is_written() -> bool:
        """While Dynamo writes a card, there is another file beside it."""
        cards[:] = [path for path in (graph.folder / "discovery/v1/mdc").rglob("*") if path.is_file()]
        return len(cards) == 1

    await until(is_written)
    cards[0].unlink()


async def models(graph: Graph) -> list[str]:
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        try:
            return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        except httpx.TransportError:
            return ["not yet"]


async def test_a_graph_whose_entries_are_gone_serves_again(graph: Graph) -> None:
    perf = perf_of(graph)
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf)
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:

        async def is_served_remotely(name: str) -> bool:
            answer = await client.post("/v1/completions", json=completion("hello", max_tokens=2), headers=session(name))
            return answer.status_code == 200 and record(answer.json())["route"] == "remote"

        await until(lambda: is_served_remotely("before"))
        entries = [path for path in (graph.folder / "discovery").rglob("*") if path.is_file()]
        kinds = {path.parent.name for path in entries}
        assert kinds == {"instances", "mdc"}
        for path in entries:
            path.unlink()
        await until(lambda: is_served_remotely("after"))
        assert {path for path in (graph.folder / "discovery").rglob("*") if path.is_file()} == set(entries)
        for name in (coordinator, *graph.processes.values()):
            # The entries may be there before the line is.
            await until(lambda name=name: "entering again" in graph.log(name))
            assert graph.log(name).count("entering again") == 1
        await delete_card(graph)
        await until(lambda: no_model(graph))
        await until(lambda: is_served_remotely("with a new card"))
        assert {path for path in (graph.folder / "discovery").rglob("*") if path.is_file()} == set(entries)
    assert graph.log(coordinator).count("entering again") == 2


async def test_a_coordinator_whose_card_is_gone_while_it_is_out_of_discovery_serves_again(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer
) -> None:
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        coordinator = graph.start_coordinator("always-local")
        graph.start_frontend()
        worker_id = await graph.new_worker("decode", perf_of(graph))
        await graph.until_answers([coordinator])
        await graph.end(graph.processes[worker_id])
        await graph.until_registered(0)
        await delete_card(graph)
        await until(lambda: no_model(graph))
        await graph.new_worker("decode", perf_of(graph))
        await graph.until_answers([coordinator])
        assert await models(graph) == [MODEL]


@pytest.mark.parametrize("limit", [(), ("--max-context-tokens", "2048")])
async def test_a_coordinator_whose_card_is_gone_before_the_first_worker_serves(
    tmp_path: Path, redis_server: EmbeddedRedis, fork_server: ForkServer, limit: tuple[str, ...]
) -> None:
    """With the limit the coordinator registers another context, and has to take a card away that is not there."""
    with empty_graph(tmp_path, redis_server.url, fork_server) as graph:
        coordinator = graph.start_coordinator("always-local")
        graph.start_frontend()
        await graph.until_announced(1)
        await delete_card(graph)
        await until(lambda: no_model(graph))
        await graph.new_worker("decode", perf_of(graph), *limit)
        await graph.until_answers([coordinator])
        assert await models(graph) == [MODEL]


async def no_model(graph: Graph) -> bool:
    return await models(graph) == []
