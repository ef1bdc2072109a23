"""The context that the model is listed with is the one that the workers accept, and longer requests are clear."""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.harness.graph import HELLO, MODEL, Graph, completion, events, profile, record
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WORKER_LIMITS = {"prefill": 2304, "decode": 2048}
LIMIT_TOKENS = min(WORKER_LIMITS.values())
LONG = [{"role": "user", "content": "The weather in Paris is mild today. " * 400}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
OPTIONS: list[dict[str, Any]] = [{}, {"stream": True}, {"tools": [TOOL]}, {"tools": [TOOL], "stream": True}]
LOCAL = {"presence_penalty": 0.5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.0, step_s=0.001)
    for role, limit in WORKER_LIMITS.items():
        await graph.new_worker(role, perf, "--max-context-tokens", str(limit), "--lease-s", "60")
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield client


async def test_the_model_is_listed_with_the_context_of_the_workers(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["context_window"] == LIMIT_TOKENS, model
    assert (await client.get(f"/v1/models/{MODEL}")).json()["context_window"] == LIMIT_TOKENS


@pytest.mark.parametrize("more", OPTIONS)
async def test_a_chat_that_is_too_long_gets_both_numbers(client: httpx.AsyncClient, more: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": LONG, "max_tokens": 2, **more}
    _has_both_numbers(await client.post("/v1/chat/completions", json=body))


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"tools": [FLAT_TOOL]}, {"tools": [FLAT_TOOL], "stream": True}])
async def test_a_response_that_is_too_long_gets_both_numbers(client: httpx.AsyncClient, more: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": LONG, "max_output_tokens": 2, **more}
    _has_both_numbers(await client.post("/v1/responses", json=body))


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_completion_that_is_too_long_gets_both_numbers(client: httpx.AsyncClient, more: dict[str, Any]) -> None:
    body = completion([5 + position % 300 for position in range(LIMIT_TOKENS + 1)], max_tokens=2, **more)
    _has_both_numbers(await client.post("/v1/completions", json=body))


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_message_that_is_too_long_gets_both_numbers(client: httpx.AsyncClient, more: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": LONG, "max_tokens": 2, **more}
    reply = await client.post("/v1/messages", json=body)
    _has_both_numbers(reply)
    assert reply.json()["error"]["type"] == "invalid_request_error"


def _has_both_numbers(reply: httpx.Response) -> None:
    assert reply.status_code == 400, reply.text
    assert "prompt is too long: " in reply.text, "agents look for it"
    numbers = [int(number) for number in re.findall(r"\d+", reply.text)]
    assert LIMIT_TOKENS in numbers, reply.text
    assert max(numbers) > LIMIT_TOKENS, reply.text


@pytest.mark.parametrize("route", [{}, LOCAL])
@pytest.mark.parametrize("more", OPTIONS)
async def test_an_answer_ends_with_the_context_whatever_max_tokens_says(
    client: httpx.AsyncClient, more: dict[str, Any], route: dict[str, Any]
) -> None:
    """Near the end of a long session an agent sends the same `max_tokens` as before."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 70_000, "ignore_eos": True, **route, **more}
    if "stream" in more:
        wanted = {**body, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/chat/completions", json=wanted) as response:
            assert response.status_code == 200
            seen = [event async for event in events(response)]
        usage = next(event["usage"] for event in seen if event.get("usage"))
        reasons = [reason for event in seen for choice in event["choices"] if (reason := choice.get("finish_reason"))]
    else:
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        usage, reasons = reply.json()["usage"], [choice["finish_reason"] for choice in reply.json()["choices"]]
    assert (usage["total_tokens"], reasons) == (LIMIT_TOKENS, ["length"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, LOCAL])
async def test_the_last_tokens_of_the_context_are_generated_on_every_route(
    client: httpx.AsyncClient, options: dict[str, Any], stream: bool
) -> None:
    prompt = [5 + position % 300 for position in range(LIMIT_TOKENS - 8)]
    body = completion(prompt, max_tokens=70_000, **options)
    if stream:
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=wanted) as response:
            seen = [event async for event in events(response)]
        usage = next(event["usage"] for event in seen if event.get("usage"))
        reasons = [reason for event in seen for choice in event["choices"] if (reason := choice.get("finish_reason"))]
    else:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert record(answer)["route"] == ("local" if options else "remote")
        usage, reasons = answer["usage"], [choice["finish_reason"] for choice in answer["choices"]]
    assert (usage["completion_tokens"], reasons) == (8, ["length"])
