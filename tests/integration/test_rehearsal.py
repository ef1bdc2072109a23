"""An agent is rehearsed without a GPU: scripted replies and grammars through the frontend's own parsers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.harness.graph import HELLO, MODEL, Graph, profile, session
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SCRIPT = (
    {"content": "I look it up.", "tool_calls": [{"name": "search", "arguments": {"q": "rain"}}]},
    {"tool_calls": [{"name": "search", "arguments": {"q": city}} for city in ("Paris", "Rome")]},
    {"content": "It rains in Paris."},
)
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "search", "parameters": SCHEMA}}
AGENT = "agent-7"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a graph in which each prompt is prefilled elsewhere, and one session is scripted."""
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    replies = graph.folder / "replies.jsonl"
    replies.write_text("\n".join(json.dumps({"session": AGENT, **line}) for line in SCRIPT))
    coordinator = graph.start_coordinator("always-remote")
    graph.start_frontend()
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf, "--replies", str(replies), "--eos-every-tokens", "128")
    await graph.until_answers([coordinator])
    async with openai.AsyncOpenAI(
        base_url=f"{graph.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


async def _ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    answer = await client.chat.completions.create(model=MODEL, messages=messages, **options)
    return answer.choices[0]


async def test_a_scripted_loop_with_tools(client: openai.AsyncOpenAI) -> None:
    """The agent's loop of the openai client: it sends back what it got, until an answer has no call."""
    messages: list[Any] = [*HELLO]
    seen = []
    while True:
        choice = await _ask(client, messages, tools=[TOOL], extra_headers=session(AGENT))
        calls = choice.message.tool_calls or []
        seen.append([json.loads(call.function.arguments)["q"] for call in calls])
        messages.append(choice.message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "wet"} for call in calls]
        if not calls:
            break
        assert choice.finish_reason == "tool_calls"
    assert seen == [["rain"], ["Paris", "Rome"], []]
    assert (choice.message.content, choice.finish_reason) == ("It rains in Paris.", "stop")


async def test_a_streamed_tool_call(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=[*HELLO], tools=[TOOL], stream=True, extra_headers=session(AGENT)
    )
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or []]
    assert "".join(call.name or "" for call in calls) == "search"
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"q": "rain"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
async def test_a_forced_tool_call(client: openai.AsyncOpenAI, choice: Any) -> None:
    answer = await _ask(client, [*HELLO], tools=[TOOL], tool_choice=choice, extra_headers=session(AGENT))
    (call,) = answer.message.tool_calls
    assert call.function.name == "search"
    assert json.loads(call.function.arguments) == {"q": "rain"}


async def test_structured_outputs(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for form in (schema, {"type": "json_object"}):
        answer = await _ask(client, [*HELLO], response_format=form, extra_headers=session(AGENT))
        assert json.loads(answer.message.content) == {"q": "rain"}
        with pytest.raises(openai.BadRequestError, match="by scripted replies only: start it with --replies"):
            await _ask(client, [*HELLO], response_format=form)


async def test_a_turn_without_limits_ends_by_itself(client: openai.AsyncOpenAI) -> None:
    ends = [
        await _ask(client, [{"role": "user", "content": text}]) for text in ("hello", "good evening", "who are you")
    ]
    assert {choice.finish_reason for choice in ends} == {"stop"}
    assert all(choice.message.content for choice in ends)
