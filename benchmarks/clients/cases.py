"""What is tried with each client: code that the interpreter of the clients runs. It raises if the feature fails.

The code finds `URL` (of the frontend), `SESSION` (a session of its own) and what the client's preamble defines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CONTEXT_TOKENS = 4096
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


LOOP = (
    {"content": "I add.", "tool_calls": [_call("add", a=1, b=2), _call("add", a=3, b=4)]},
    {"content": "I add again.", "tool_calls": [_call("add", a=3, b=7)]},
    {"content": "It is 10."},
)
"""Three rounds of an agent, the first with two calls at a time."""

CALLS = ({"tool_calls": [_call("add", a=3, b=7)]}, {"content": "It is 10."})
"""Two rounds of an agent, a call without any text and the answer."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table.

    Attributes:
        before: how it failed before it was fixed; empty: it never did.
        replies: the scripted replies of its session; a random model has none, so such a row is for the modelled engine.
    """

    name: str
    code: str
    before: str = ""
    replies: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """A package. `module`: what shows that it is installed."""

    name: str
    module: str
    preamble: str
    features: tuple[Feature, ...] = field(default=())


_OPENAI = f"""
from openai import APIStatusError, OpenAI
named = {{"x-dynamo-session-id": SESSION}}
client = OpenAI(base_url=f"{{URL}}/v1", api_key="none", max_retries=0, default_headers=named)
hello = [{{"role": "user", "content": "Good morning"}}]
tool, schema = {_TOOL!r}, {_SCHEMA!r}
form = {{"type": "json_schema", "json_schema": {{"name": "answer", "schema": schema, "strict": True}}}}
def chat(**options):
    return client.chat.completions.create(**{{"model": "tiny", "messages": hello, "max_tokens": 60, **options}})
def respond(**options):
    return client.responses.create(**{{"model": "tiny", "max_output_tokens": 200, **options}})
def streamed(**options):
    return list(chat(stream=True, **options))
def refused(**options):
    try:
        chat(**options)
    except APIStatusError as error:
        return error
    raise AssertionError("it was accepted")
def numbers(error):
    assert error.status_code == 400, error
    assert "{CONTEXT_TOKENS}" in str(error), error
long = [{{"role": "user", "content": "word " * {CONTEXT_TOKENS}}}]
"""

_BY_ROUTE = "500 or 400, by the route"
_REASONLESS = '500 "Internal server error", or 200 with an error event'

OPENAI = Client(
    "openai",
    "openai",
    _OPENAI,
    (
        Feature(
            "a chat without `max_tokens` ends",
            "assert client.chat.completions.create(model='tiny', messages=hello).choices[0].finish_reason",
            "never ended on the modelled engine",
        ),
        Feature(
            "a stream with usage", "assert streamed(stream_options={'include_usage': True})[-1].usage.total_tokens"
        ),
        Feature("`tool_choice` required", "assert chat(tools=[tool], tool_choice='required').choices", _REASONLESS),
        Feature(
            "`tool_choice` with a name",
            "assert chat(tools=[tool], tool_choice={'type': 'function', 'function': {'name': 'add'}}).choices",
            _REASONLESS,
        ),
        Feature(
            "`tool_choice` required, streamed", "assert streamed(tools=[tool], tool_choice='required')", _REASONLESS
        ),
        Feature(
            "`response_format` with a schema", "assert chat(response_format=form).choices[0].message.content", "400"
        ),
        Feature("`response_format`, streamed", "assert streamed(response_format=form)", _REASONLESS),
        Feature(
            "`logprobs` of a chat",
            "assert chat(logprobs=True).choices[0].logprobs.content[0].logprob <= 0",
            "400 on SGLang",
        ),
        Feature(
            "`top_logprobs: 0`",
            "assert chat(logprobs=True, top_logprobs=0).choices[0].logprobs.content",
            "null on SGLang",
        ),
        Feature(
            "`logprobs` of a completion",
            "done = client.completions.create(model='tiny', prompt='Good', max_tokens=5, logprobs=2)\n"
            "assert done.choices[0].logprobs.token_logprobs",
            "500 on SGLang",
        ),
        Feature("`seed` at temperature 0", "assert chat(seed=7, temperature=0).choices", "no effect, and always local"),
        Feature(
            "prompt + `max_tokens` beyond the context, chat",
            "assert chat(max_tokens=70000, stop=['zzzz']).choices[0].finish_reason",
            _BY_ROUTE,
        ),
        Feature("the same, streamed", "assert streamed(max_tokens=70000)[-1].choices[0].finish_reason", _REASONLESS),
        Feature("the same, with tools", "assert chat(max_tokens=70000, tools=[tool]).choices", _REASONLESS),
        Feature(
            "the same, completion",
            "assert client.completions.create(model='tiny', prompt='Good', max_tokens=70000).choices",
            '500 "Failed to fold completions stream"',
        ),
        Feature("a prompt beyond the workers' context, chat", "numbers(refused(messages=long))"),
        Feature("the same, streamed", "numbers(refused(messages=long, stream=True))", _REASONLESS),
        Feature("the same, with tools", "numbers(refused(messages=long, tools=[tool]))", _REASONLESS),
        Feature("`/v1/responses`", "assert respond(input=hello).output_text"),
        Feature(
            "the same, streamed",
            "kinds = [event.type for event in respond(input=hello, stream=True)]\n"
            "ends = ('response.completed', 'response.incomplete')\n"
            "assert 'response.output_text.delta' in kinds and kinds[-1] in ends, kinds[-3:]",
        ),
        Feature(
            "the same, tool call and its result",
            "asked = [*hello]\n"
            "first = respond(input=asked, tools=[{'type': 'function', 'strict': False, **tool['function']}])\n"
            "(call,) = (item for item in first.output if item.type == 'function_call')\n"
            "asked += [call.model_dump(exclude_none=True),\n"
            "          {'type': 'function_call_output', 'call_id': call.call_id, 'output': '10'}]\n"
            "assert respond(input=asked).output_text.strip() == 'It is 10.'",
            replies=CALLS,
        ),
        Feature(
            "a refusal with tools",
            "body = {'nvext': {'annotations': ['ttft_target:never']}}\n"
            "error = refused(tools=[tool], extra_body=body)\n"
            "assert error.status_code == 400 and 'ttft_target' in str(error), error",
            '500 "Internal server error"',
        ),
        Feature(
            "a session id of 600 characters, chat",
            "error = refused(extra_headers={'x-dynamo-session-id': 'x' * 600})\n"
            "assert error.status_code == 400 and '512' in str(error), error",
        ),
        Feature(
            "headers that name a session",
            "for name in ('x-dynamo-session-id', 'session-id', 'x-session-id', 'x-claude-code-session-id'):\n"
            "    other = OpenAI(base_url=f'{URL}/v1', api_key='none', default_headers={name: f'{SESSION}-{name}'})\n"
            "    body = {'nvext': {'extra_fields': ['engine_data']}}\n"
            "    done = other.chat.completions.create(model='tiny', messages=hello, max_tokens=5, extra_body=body)\n"
            "    assert done.nvext['engine_data']['ampd']['session_id'] == f'{SESSION}-{name}', (name, done.nvext)",
        ),
    ),
)

_AGENTS = """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
import asyncio
set_tracing_disabled(True)
class Answer(BaseModel):
    city: str
    count: int
@function_tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
settings = ModelSettings(extra_headers={"x-dynamo-session-id": SESSION}, max_tokens=200)
def agent(**options):
    return Agent(name="a", model=OpenAIChatCompletionsModel("tiny", client), model_settings=settings, **options)
"""

_LANGGRAPH = """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
class Answer(BaseModel):
    city: str
    count: int
@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
model = ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="none", max_tokens=200, max_retries=0,
                   default_headers={"x-dynamo-session-id": SESSION})
"""

_SMOLAGENTS = """
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return a + b
model = OpenAIServerModel("tiny", api_base=f"{URL}/v1", api_key="none", max_tokens=300,
                          client_kwargs={"default_headers": {"x-dynamo-session-id": SESSION}, "max_retries": 0})
"""

_PYDANTIC = """
import asyncio
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
class Answer(BaseModel):
    city: str
    count: int
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
settings = {"extra_headers": {"x-dynamo-session-id": SESSION}, "max_tokens": 200}
"""

_LLAMA = """
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
import asyncio
class Answer(BaseModel):
    city: str
    count: int
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
model = OpenAILike(model="tiny", api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_retries=0,
                   is_function_calling_model=True, max_tokens=200,
                   default_headers={"x-dynamo-session-id": SESSION})
"""

_LITELLM = f"""
import json, litellm
tool = {_TOOL!r}
def ask(messages, **options):
    return litellm.completion("openai/tiny", messages, api_base=f"{{URL}}/v1", api_key="none", max_tokens=200,
                              num_retries=0, extra_headers={{"x-dynamo-session-id": SESSION}}, **options)
"""

_ANTHROPIC = """
from anthropic import Anthropic
client = Anthropic(base_url=URL, api_key="none", max_retries=0, default_headers={"x-dynamo-session-id": SESSION})
hello = [{"role": "user", "content": "Good morning"}]
tool = {"name": "add", "description": "Add two numbers.", "input_schema": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}
"""

CLIENTS = (
    OPENAI,
    Client(
        "openai-agents",
        "agents",
        _AGENTS,
        (
            Feature(
                "tool loop, 3 rounds with 2 parallel calls",
                "done = Runner.run_sync(agent(tools=[add]), 'Add')\n"
                "assert done.final_output.strip() == 'It is 10.', done",
                replies=LOOP,
            ),
            Feature(
                "the same, streamed",
                "async def run():\n"
                "    done = Runner.run_streamed(agent(tools=[add]), 'Add')\n"
                "    async for _ in done.stream_events(): pass\n"
                "    return done.final_output\n"
                "assert 'It is 10.' in asyncio.run(run())",
                replies=LOOP,
            ),
            Feature(
                "tool loop by `/v1/responses`",
                "from agents import OpenAIResponsesModel\n"
                "other = agent(tools=[add])\n"
                "other.model = OpenAIResponsesModel('tiny', client)\n"
                "assert Runner.run_sync(other, 'Add').final_output.strip() == 'It is 10.'",
                replies=LOOP,
            ),
            Feature(
                "`output_type`",
                "assert isinstance(Runner.run_sync(agent(output_type=Answer), 'Where?').final_output, Answer)",
                "400 on the modelled engine",
            ),
        ),
    ),
    Client(
        "LangGraph",
        "langchain_openai",
        _LANGGRAPH,
        (
            Feature(
                "tool loop, 3 rounds with 2 parallel calls",
                "done = create_agent(model, [add]).invoke({'messages': [('user', 'Add')]})\n"
                "assert done['messages'][-1].content.strip() == 'It is 10.', done",
                replies=LOOP,
            ),
            Feature(
                "the same, streamed",
                "parts = create_agent(model, [add]).stream({'messages': [('user', 'Add')]}, stream_mode='messages')\n"
                "chunks = [chunk for chunk, _ in parts if chunk.type == 'AIMessageChunk']\n"
                "assert len(chunks) > 9 and 'It is 10.' in ''.join(chunk.text for chunk in chunks), chunks",
                replies=LOOP,
            ),
            Feature(
                "`with_structured_output(function_calling)`",
                "form = model.with_structured_output(Answer, method='function_calling')\n"
                "assert isinstance(form.invoke('Where?'), Answer)",
                "500 on the modelled engine",
            ),
            Feature(
                "`tool_choice='any'`",
                "assert model.bind_tools([add], tool_choice='any').invoke('Add').tool_calls",
                "500 on the modelled engine",
            ),
        ),
    ),
    Client(
        "smolagents",
        "smolagents",
        _SMOLAGENTS,
        (
            Feature(
                "ToolCallingAgent",
                "assert str(ToolCallingAgent([add], model, max_steps=4).run('Add 3 and 7')) == '10'",
                "500, and three retries",
                (
                    {"tool_calls": [_call("add", a=3, b=7)]},
                    {"tool_calls": [_call("final_answer", answer="10")]},
                ),
            ),
        ),
    ),
    Client(
        "pydantic-ai",
        "pydantic_ai",
        _PYDANTIC,
        (
            Feature(
                "tool loop, 3 rounds with 2 parallel calls",
                "done = Agent(model, tools=[add]).run_sync('Add', model_settings=settings)\n"
                "assert done.output.strip() == 'It is 10.', done",
                replies=LOOP,
            ),
            Feature(
                "the same, streamed by `run_stream_events`",
                "async def run():\n"
                "    async with agent.run_stream_events('Add', model_settings=settings) as events:\n"
                "        return [event async for event in events]\n"
                "agent = Agent(model, tools=[add])\n"
                "events = asyncio.run(run())\n"
                "assert len(events) > 9 and events[-1].result.output.strip() == 'It is 10.', events",
                replies=LOOP,
            ),
            Feature(
                "`run_stream`, a call and the answer",
                "async def run():\n"
                "    async with Agent(model, tools=[add]).run_stream('Add', model_settings=settings) as done:\n"
                "        return await done.get_output()\n"
                "assert asyncio.run(run()).strip() == 'It is 10.'",
                replies=CALLS,
            ),
            Feature(
                "`output_type`",
                "done = Agent(model, output_type=Answer).run_sync('Where?', model_settings=settings)\n"
                "assert isinstance(done.output, Answer), done",
                "500 on the modelled engine",
            ),
        ),
    ),
    Client(
        "LlamaIndex",
        "llama_index.llms.openai_like",
        _LLAMA,
        (
            Feature(
                "FunctionAgent, 3 rounds with 2 parallel calls",
                "from llama_index.core.agent.workflow import FunctionAgent\n"
                "async def run():\n"
                "    return str(await FunctionAgent(tools=[add], llm=model, streaming=False).run('Add'))\n"
                "assert 'It is 10.' in asyncio.run(run())",
                replies=LOOP,
            ),
            Feature(
                "the same, streamed",
                "from llama_index.core.agent.workflow import AgentStream, FunctionAgent\n"
                "async def run():\n"
                "    running = FunctionAgent(tools=[add], llm=model).run('Add')\n"
                "    events = [event async for event in running.stream_events()]\n"
                "    deltas = [event.delta for event in events if isinstance(event, AgentStream)]\n"
                "    assert len(deltas) > 9, deltas\n"
                "    return str(await running)\n"
                "assert 'It is 10.' in asyncio.run(run())",
                replies=LOOP,
            ),
            Feature(
                "`as_structured_llm`",
                "done = model.as_structured_llm(Answer).chat([ChatMessage(role='user', content='Where?')])\n"
                "assert isinstance(done.raw, Answer), done",
                "500 on the modelled engine",
            ),
        ),
    ),
    Client(
        "litellm",
        "litellm",
        _LITELLM,
        (
            Feature(
                "tool loop, 3 rounds with 2 parallel calls",
                "messages = [{'role': 'user', 'content': 'Add'}]\n"
                "while True:\n"
                "    message = ask(messages, tools=[tool]).choices[0].message\n"
                "    if not message.tool_calls: break\n"
                "    messages.append(message.model_dump())\n"
                "    for call in message.tool_calls:\n"
                "        messages.append({'role': 'tool', 'tool_call_id': call.id, 'content': '10'})\n"
                "assert message.content.strip() == 'It is 10.' and len(messages) == 6, messages",
                replies=LOOP,
            ),
            Feature(
                "a streamed call",
                "chunks = list(ask([{'role': 'user', 'content': 'Add'}], tools=[tool], stream=True))\n"
                "calls = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls\n"
                "assert [json.loads(call.function.arguments) for call in calls] == [{'a': 3, 'b': 7}], calls",
                replies=CALLS,
            ),
        ),
    ),
    Client(
        "anthropic",
        "anthropic",
        _ANTHROPIC,
        (
            Feature("messages", "assert client.messages.create(model='tiny', messages=hello, max_tokens=20).content"),
            Feature(
                "stream",
                "with client.messages.stream(model='tiny', messages=hello, max_tokens=20) as stream:\n"
                "    assert stream.get_final_text()",
            ),
            Feature(
                "tool call",
                "done = client.messages.create(model='tiny', messages=hello, max_tokens=200, tools=[tool])\n"
                "assert [part.name for part in done.content if part.type == 'tool_use'] == ['add', 'add'], done",
                replies=LOOP,
            ),
            Feature(
                "`tool_choice` any",
                "assert client.messages.create(model='tiny', messages=hello, max_tokens=200, tools=[tool],\n"
                "                              tool_choice={'type': 'any'}).content",
                "500 on the modelled engine",
            ),
        ),
    ),
)


def session_of(client: Client, feature: Feature) -> str:
    """The session of a row, by which its scripted replies are found."""
    return f"{client.module}-{client.features.index(feature)}"


def replies() -> str:
    """The scripted replies of all rows, as `ampd serve --replies` reads them."""
    lines = [
        json.dumps({"session": session_of(client, feature), **reply})
        for client in CLIENTS
        for feature in client.features
        for reply in feature.replies
    ]
    return "\n".join(lines) + "\n"
