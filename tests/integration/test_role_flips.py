"""Workers whose role changes while sessions go on, in a whole graph with two coordinators."""

import asyncio
import signal
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.types import Role
from tests.harness.graph import SHORT_LEASE, Graph, ask, completion, events, profile, record, session
from tests.harness.scripted_roles import assign, role_flags, until_role
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5 + position % 300 for position in range(200)]
OUTPUT_TOKENS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coordinators(graph: Graph) -> list[str]:
    """Both ask for what the file says."""
    graph.environment["DYN_LOG"] = "info"
    assign(graph)
    # The session of the first test is to go on at a worker that owns no sessions any more.
    flags = [*role_flags(graph), *SHORT_LEASE, "--moves", "never"]
    return [
        graph.start_coordinator("always-remote", *flags, module="tests.harness.scripted_coordinator") for _ in range(2)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph, coordinators: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    """One prefill and two decode workers, a token every 20 ms."""
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.02)
    graph.start_frontend()
    for role in ("prefill", "decode", "decode"):
        await graph.new_worker(role, perf)
    await graph.until_answers(coordinators)
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as http:
        yield http


_NAMES = map(str, count())


async def newcomers(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The records of some new sessions' first rounds, all at once."""
    asked = [ask(client, [5 + number] * 40, f"new-{next(_NAMES)}") for number in range(8)]
    return [decision for _, decision in await asyncio.gather(*asked)]


@pytest.mark.long
async def test_a_decode_worker_becomes_a_prefill_worker_and_back_while_its_session_goes_on(
    client: httpx.AsyncClient, graph: Graph, coordinators: list[str]
) -> None:
    expected, _ = await ask(client, PROMPT, "elsewhere", OUTPUT_TOKENS)
    body = {**completion(PROMPT, max_tokens=OUTPUT_TOKENS), "stream": True}
    text, flipped = "", ""
    async with client.stream("POST", "/v1/completions", json=body, headers=session("stays")) as response:
        async for event in events(response):
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            if not flipped:
                flipped = record(event)["decode_worker"]
                assign(graph, **{flipped: ("prefill", "late")})
                await until_role(graph, flipped, Role.PREFILL, "late")
    assert text == expected, "the round that was running went on"

    while any(decision["decode_worker"] == flipped for decision in await newcomers(client)):
        pass  # a coordinator may hear of the new role a moment later than this test
    new = await newcomers(client)
    assert flipped not in {decision["decode_worker"] for decision in new}
    assert flipped in {decision["prefill_worker"] for decision in new}, "it does what its new role asks of it"

    longer = PROMPT + [9] * 50
    there, decision = await ask(client, longer, "stays", 5)
    assert (await ask(client, longer, "fresh", 5))[0] == there
    assert (decision["decode_worker"], decision["epoch"], decision["retries"]) == (flipped, 1, 0), "bound sessions stay"
    assert decision["hist_tokens"] >= len(PROMPT) // 16 * 16
    assert decision["prefill_worker"] not in (None, flipped)

    assign(graph, **{flipped: ("decode", "")})
    await until_role(graph, flipped, Role.DECODE)
    while flipped not in {decision["decode_worker"] for decision in await newcomers(client)}:
        pass
    longer += [11] * 50
    assert (await ask(client, longer, "stays", 5))[1]["decode_worker"] == flipped

    said = [line for name in coordinators for line in graph.log(name).splitlines() if f"worker {flipped}:" in line]
    assert ["decode -> prefill (script)" in line for line in said] == [True, False]
    assert "prefill -> decode (script)" in said[1]
    worker_log = graph.log(graph.processes[flipped])
    assert "role: decode -> prefill (script)" in worker_log
    assert not graph.supervisor.ended(), "nothing was restarted"


async def test_a_killed_leader_is_replaced_after_its_lease(
    client: httpx.AsyncClient,  # noqa: ARG001
    graph: Graph,
    coordinators: list[str],
) -> None:
    (leader,) = [name for name in coordinators if "this coordinator leads" in graph.log(name)]
    (other,) = set(coordinators) - {leader}
    (prefill,) = [view.worker_id for view in await graph.until_workers(3) if view.role is Role.PREFILL]
    await graph.end(leader, signal.SIGKILL)
    assign(graph, **{prefill: ("decode", "")})
    await until_role(graph, prefill, Role.DECODE)
    # It writes its line when the shared state has the role, so the worker may be faster.
    await until(lambda: f"worker {prefill}: prefill -> decode (script)" in graph.log(other))


async def test_a_worker_that_starts_has_the_role_of_its_flag(client: httpx.AsyncClient, graph: Graph) -> None:  # noqa: ARG001
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.02)
    (prefill,) = [worker for worker, name in graph.processes.items() if name.startswith("prefill")]
    await until_role(graph, prefill, Role.DECODE)
    await graph.end(graph.processes[prefill])
    await until_role(graph, await graph.new_worker("prefill", perf), Role.PREFILL)
