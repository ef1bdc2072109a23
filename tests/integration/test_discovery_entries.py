"""Processes whose entries in discovery were deleted, as after a standstill of all of them, enter again and serve."""

import httpx
import pytest

from tests.harness.graph import Graph, completion, profile, record, session
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_a_graph_whose_entries_are_gone_serves_again(graph: Graph) -> None:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.002)
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
        assert graph.log(name).count("entering again") == 1
