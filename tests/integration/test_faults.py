"""Workers, clients and the shared state go away in the middle of rounds, in a whole graph."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.keys import session_key
from ampd.state.embedded import EmbeddedRedis
from ampd.types import Role
from tests.harness.graph import SHORT_LEASE, Graph, completion, events, profile, record, session
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG = [5 + position % 300 for position in range(1200)]
"""Takes a prefill worker a minute."""

OUTPUT_TOKENS = 60


@pytest.fixture(scope="module")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A Redis of this module alone, because a test stops it for a while."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def slow(graph: Graph) -> Path:
    """Prefill workers: long prompts hang."""
    return profile(graph.folder, prefill_s=0.005, long_prefill_s=60.0, step_s=0.002)


@pytest.fixture(scope="module")
def steady(graph: Graph) -> Path:
    """Decode workers: a token every 40 ms."""
    return profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.04)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph, slow: Path, steady: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Routed `always-remote`, over two decode workers and a prefill worker."""
    coordinator = graph.start_coordinator("always-remote", *SHORT_LEASE)
    graph.environment |= {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "8"}
    graph.start_frontend()
    await graph.new_worker("prefill", slow)
    for _ in range(2):
        await graph.new_worker("decode", steady, *SHORT_LEASE)
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as http:
        yield http


async def text_of(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


async def test_a_client_that_goes_away_ends_the_work(client: httpx.AsyncClient, graph: Graph) -> None:
    body = completion([9] * 40, max_tokens=2000, stream=True)
    async with client.stream("POST", "/v1/completions", json=body, headers=session("leaver")) as response:
        stream = events(response)  # whoever lets go of it closes the connection
        for _ in range(5):
            await anext(stream)
        await graph.until_views(lambda views: sum(view.decode_batch for view in views) == 1)
    gone_s = time.monotonic()
    await graph.until_views(lambda views: not any(view.decode_batch or view.queue for view in views))
    print(f"a stream's work ended {time.monotonic() - gone_s:.3f} s after its client")
    assert (await client.post("/v1/completions", json=completion([9] * 41, max_tokens=2))).status_code == 200


async def test_a_client_that_goes_away_during_a_prefill_leaves_no_queue_entry(
    client: httpx.AsyncClient, graph: Graph
) -> None:
    asked = asyncio.create_task(client.post("/v1/completions", json=completion(LONG, max_tokens=5)))
    await graph.until_views(lambda views: any(view.queue for view in views if view.role is Role.PREFILL))
    asked.cancel()
    await graph.until_views(lambda views: not any(view.queue or view.decode_batch for view in views))


@pytest.mark.long
async def test_a_killed_decode_worker_s_round_goes_on_at_another(
    client: httpx.AsyncClient, graph: Graph, steady: Path
) -> None:
    body = completion([11] * 50, max_tokens=OUTPUT_TOKENS)
    expected = await text_of(client, body)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", headers=session("moved"), json=streamed) as response:
        stream = events(response)
        seen: list[dict[str, Any]] = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 10:
                victim = record(seen[0])["decode_worker"]
                os.kill(graph.pid(graph.processes[victim]), signal.SIGKILL)
        text = "".join(choice["text"] for event in seen for choice in event["choices"])
    last = [record(event) for event in seen if event.get("nvext")][-1]
    assert text == expected
    assert last["decode_worker"] != victim
    assert last["retries"] == 1
    assert last["epoch"] == 2
    assert [event["usage"]["completion_tokens"] for event in seen if event.get("usage")] == [OUTPUT_TOKENS]
    again = await client.post("/v1/completions", json=body, headers=session("moved"))
    assert record(again.json())["decode_worker"] == last["decode_worker"]
    await graph.new_worker("decode", steady, *SHORT_LEASE)


async def test_a_killed_prefill_worker_s_round_is_prefilled_locally(
    client: httpx.AsyncClient, graph: Graph, slow: Path
) -> None:
    asked = asyncio.create_task(client.post("/v1/completions", json=completion(LONG, max_tokens=8)))
    victim = await graph.until_views(
        lambda views: next((view.worker_id for view in views if view.role is Role.PREFILL and view.queue), None)
    )
    await graph.end(graph.processes[victim], signal.SIGKILL)
    answer = (await asked).json()
    assert record(answer)["reason"] == "prefill-worker-lost"
    assert record(answer)["route"] == "local"
    assert record(answer)["retries"] == 1
    # The last prefill worker stays in the view until its lease is over. Rounds that try it go on locally.
    reason = "prefill-worker-lost"
    async with asyncio.timeout(PATIENCE_S):
        while reason == "prefill-worker-lost":
            without = (await client.post("/v1/completions", json=completion(LONG, max_tokens=8))).json()
            assert without["choices"][0]["text"] == answer["choices"][0]["text"]
            reason = record(without)["reason"]
    assert reason == "no-prefill-worker"
    await graph.new_worker("prefill", slow)


@pytest.mark.long
async def test_a_round_leaves_a_worker_that_is_silent_for_too_long(client: httpx.AsyncClient, graph: Graph) -> None:
    body = completion([13] * 50, max_tokens=OUTPUT_TOKENS)
    expected = await text_of(client, body)
    body["stream"] = True
    seen: list[dict[str, Any]] = []
    hung = 0
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply,
        ):
            async for event in events(reply):
                seen.append(event)
                if len(seen) == 10:
                    hung = graph.pid(graph.processes[record(seen[0])["decode_worker"]])
                    os.kill(hung, signal.SIGSTOP)
    finally:
        os.kill(hung, signal.SIGCONT)
    assert "".join(choice["text"] for event in seen for choice in event["choices"]) == expected
    assert [record(event) for event in seen if event.get("nvext")][-1]["retries"] == 1
    await graph.until_workers(3)


async def test_rounds_go_on_while_the_shared_state_is_away(client: httpx.AsyncClient, graph: Graph) -> None:
    body = completion([17] * 50, max_tokens=4)
    before = record((await client.post("/v1/completions", json=body, headers=session("outage"))).json())
    redis = await redis_pid(graph)
    os.kill(redis, signal.SIGSTOP)
    try:
        during = [
            record((await client.post("/v1/completions", json=body, headers=session(name))).json())
            for name in ("outage", "born-in-it", "born-in-it")
        ]
    finally:
        os.kill(redis, signal.SIGCONT)
    assert during[0]["decode_worker"] == before["decode_worker"]
    assert during[1]["decode_worker"] == during[2]["decode_worker"]
    await graph.until_workers(3)
    after = record((await client.post("/v1/completions", json=body, headers=session("born-in-it"))).json())
    assert after["decode_worker"] == during[1]["decode_worker"]
    store = await graph.store()
    async with asyncio.timeout(PATIENCE_S):
        while (bound := await store.binding(session_key("", "born-in-it"))) is None:
            await client.post("/v1/completions", json=body, headers=session("born-in-it"))
    assert bound.worker_id == during[1]["decode_worker"]
    await store.close()


@pytest.mark.long
async def test_a_worker_that_drains_finishes_a_prefill_that_takes_longer_than_its_lease(
    client: httpx.AsyncClient, graph: Graph, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left the shared state, and its stream is silent. It is alive all the same."""
    views = await graph.until_workers(3)
    await graph.end(graph.processes[next(view.worker_id for view in views if view.role is Role.PREFILL)])
    lasting = profile(graph.folder, prefill_s=0.005, long_prefill_s=6.0, step_s=0.002)
    with monkeypatch.context() as patch:
        patch.setitem(graph.environment, "DYN_LOG", "info")
        leaver = await graph.new_worker("prefill", lasting, *SHORT_LEASE, "--log-rounds", "steps")
    name = graph.processes[leaver]
    short = completion([5] * 40, max_tokens=2)
    while record((await client.post("/v1/completions", json=short)).json())["prefill_worker"] != leaver:
        pass  # the coordinator does not know it yet
    begun = graph.log(name).count("prefill picked")
    asked = asyncio.create_task(client.post("/v1/completions", json=completion(LONG, max_tokens=8)))
    # The shared state has the prefill before the worker does.
    await until(lambda: graph.log(name).count("prefill picked") > begun, PATIENCE_S)
    os.kill(graph.pid(name), signal.SIGTERM)
    answer = record((await asked).json())
    assert (answer["prefill_worker"], answer["retries"]) == (leaver, 0)
    assert "exit code 0" in await graph.until_ended(name)
    await graph.new_worker("prefill", slow)


@pytest.mark.long
async def test_sigterm_lets_the_rounds_in_progress_finish(client: httpx.AsyncClient, graph: Graph) -> None:
    body = completion([19] * 50, max_tokens=OUTPUT_TOKENS)
    expected = await text_of(client, body)
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        seen = []
        async for event in events(response):
            seen.append(event)
            if len(seen) == 5:
                os.kill(graph.pid("coordinator-0"), signal.SIGTERM)
    assert "".join(choice["text"] for event in seen for choice in event["choices"]) == expected
    assert "exit code 0" in await graph.until_ended("coordinator-0")


async def redis_pid(graph: Graph) -> int:
    from redis.asyncio import from_url

    connection = from_url(graph.redis_url)
    try:
        return int((await connection.info("server"))["process_id"])
    finally:
        await connection.aclose()
