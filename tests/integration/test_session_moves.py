"""Sessions that leave an owner whose role changes, in a whole graph with four workers and two coordinators."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.types import Role, WorkerView
from tests.harness.graph import Graph, ask, completion, events, profile, session
from tests.harness.scripted_roles import assign, role_flags, until_role
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OUTPUT_TOKENS = 40
SESSIONS = [f"agent-{number}" for number in range(9)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    """One prefill and three decode workers. Rounds are prefilled where their session is owned."""
    graph.environment["DYN_LOG"] = "info"
    assign(graph)
    flags = ["--binding", "dice", *role_flags(graph)]
    names = [
        graph.start_coordinator("always-local", *flags, module="tests.harness.scripted_coordinator") for _ in range(2)
    ]
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.02)
    graph.start_frontend()
    for role in ("prefill", "decode", "decode", "decode"):
        await graph.new_worker(role, perf)
    await graph.until_answers(names)
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as connected:
        yield connected


def prompt_of(name: str) -> list[int]:
    return [5 + (position * 7 + SESSIONS.index(name)) % 300 for position in range(200)]


async def rounds(client: httpx.AsyncClient, more: list[int]) -> dict[str, tuple[str, dict[str, Any]]]:
    """A round of every session, all at once."""
    asked = [ask(client, prompt_of(name) + more, name) for name in SESSIONS]
    return dict(zip(SESSIONS, await asyncio.gather(*asked), strict=True))


@pytest.mark.long
async def test_sessions_leave_a_worker_that_becomes_a_prefill_worker_and_take_their_kv_with_them(
    client: httpx.AsyncClient, graph: Graph
) -> None:
    before = await rounds(client, [])
    leaving = before[SESSIONS[0]][1]["decode_worker"]
    owned = {name for name, (_, made) in before.items() if made["decode_worker"] == leaving}

    # One of its sessions has a round in progress when the role changes.
    running = SESSIONS[0]
    body = {**completion(prompt_of(running), max_tokens=OUTPUT_TOKENS), "stream": True}
    text, is_turned = "", False
    async with client.stream("POST", "/v1/completions", json=body, headers=session(running)) as response:
        async for event in events(response):
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            if not is_turned:
                is_turned = True
                assign(graph, **{leaving: ("prefill", "")})
                await until_role(graph, leaving, Role.PREFILL)

    # A coordinator may learn of the role a moment later than this test, so that some sessions move with a later round.
    more: list[int] = []
    moved: dict[str, dict[str, Any]] = {}
    answers: dict[tuple[str, int], str] = {}
    while moved.keys() != owned:
        more = [*more, *[9 + len(more) % 50] * 32]
        after = await rounds(client, more)
        for name, (answer, made) in after.items():
            answers[name, len(more)] = answer
            assert made["retries"] == 0
            if made["move_reason"]:
                assert name not in moved, "a session moves once, also if a replica has not heard of it"
                moved[name] = made
            if name not in owned:
                assert (made["decode_worker"], made["epoch"]) == (before[name][1]["decode_worker"], 1)
    # Only now, because a worker with the same prompt of another session needs no history from elsewhere.
    for (name, length), answer in answers.items():
        fresh, _ = await ask(client, prompt_of(name) + more[:length], f"fresh-{name}-{length}")
        assert answer == fresh
    expected, _ = await ask(client, prompt_of(running), "fresh")
    assert text.startswith(expected), "the round in progress went on"
    for made in moved.values():
        assert (made["move_reason"], made["epoch"]) == ("role", 2)
        assert made["decode_worker"] != leaving
        assert made["hist_tokens"] >= 192
        assert made["kv_read_tokens_history"] >= 192, "the history came from the old owner"
        assert made["hit_tokens"]["recomputed"] == 0

    def is_released(views: list[WorkerView]) -> bool:
        keys = {made["session_key"] for made in moved.values()}
        (view,) = [view for view in views if view.worker_id == leaving]
        return not keys & view.held_tokens.keys()

    await graph.until_views(is_released)
    settled = await rounds(client, [*more, *[7] * 20])
    assert {name: made["epoch"] for name, (_, made) in settled.items()} == {
        name: 2 if name in owned else 1 for name in SESSIONS
    }
    assert leaving not in {made["decode_worker"] for _, made in settled.values()}
    assert not graph.supervisor.ended(), "nothing was restarted"
