"""Workers that own sessions and prefill for others, and a worker that goes through all roles while sessions go on."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.types import Role
from tests.harness.graph import Graph, ask, profile
from tests.harness.scripted_roles import assign, role_flags, until_role
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5 + position % 300 for position in range(200)]
MORE = [9] * 50


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(graph: Graph) -> list[str]:
    """A mixed and a decode worker, in this order."""
    graph.environment["DYN_LOG"] = "info"
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.005)
    return [await graph.new_worker(role, perf) for role in ("mixed", "decode")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph, workers: list[str]) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ARG001
    """Each round is prefilled elsewhere if any other worker takes prefills."""
    assign(graph)
    graph.start_frontend()
    flags = ["--binding", "dice", *role_flags(graph)]
    name = graph.start_coordinator("always-remote", *flags, module="tests.harness.scripted_coordinator")
    await graph.until_answers([name])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as connected:
        yield connected


async def newcomers(client: httpx.AsyncClient) -> set[tuple[str, str | None]]:
    """(decode worker, prefill worker) of the first rounds of some new sessions; None: a local prefill."""
    asked = [ask(client, [5 + number] * 40, uuid.uuid4().hex) for number in range(8)]
    return {(made["decode_worker"], made["prefill_worker"]) for _, made in await asyncio.gather(*asked)}


async def until_placed(client: httpx.AsyncClient, expected: set[tuple[str, str | None]]) -> None:
    """Wait until new sessions are placed like this. A coordinator may learn of a role a moment later than this test."""

    async def are_placed() -> bool:
        return await newcomers(client) == expected

    await until(are_placed)


async def test_a_mixed_worker_owns_a_session_and_prefills_the_round_of_another(
    client: httpx.AsyncClient, workers: list[str]
) -> None:
    mixed, decode = workers
    await until_placed(client, {(decode, mixed), (mixed, None)})


async def test_a_worker_goes_from_decode_over_mixed_to_prefill_while_its_session_goes_on(
    client: httpx.AsyncClient, graph: Graph, workers: list[str]
) -> None:
    mixed, changing = workers
    name, made = "", dict[str, Any](decode_worker=mixed)
    while made["decode_worker"] != changing:
        name = uuid.uuid4().hex
        _, made = await ask(client, PROMPT, name)

    assign(graph, **{changing: ("mixed", "")})
    await until_role(graph, changing, Role.MIXED)
    await until_placed(client, {(changing, mixed), (mixed, changing)})
    text, made = await ask(client, PROMPT + MORE, name)
    assert (made["decode_worker"], made["prefill_worker"], made["epoch"]) == (changing, mixed, 1)
    assert made["hist_tokens"] >= len(PROMPT) // 16 * 16
    assert (await ask(client, PROMPT + MORE, "fresh"))[0] == text

    assign(graph, **{changing: ("prefill", "")})
    await until_role(graph, changing, Role.PREFILL)
    await until_placed(client, {(mixed, changing)})
    text, made = await ask(client, PROMPT + MORE + MORE, name)
    assert (made["decode_worker"], made["prefill_worker"], made["move_reason"]) == (mixed, changing, "role")
    assert (await ask(client, PROMPT + MORE + MORE, "fresh"))[0] == text

    worker_log = graph.log(graph.processes[changing])
    assert "role: decode -> mixed (script)" in worker_log
    assert "role: mixed -> prefill (script)" in worker_log
    assert not graph.supervisor.ended(), "nothing was restarted"
