"""What is tried with the frameworks of agents: loops of tools, streams and outputs of a given form."""

from __future__ import annotations

from benchmarks.clients.feature import CALLS, GUIDED, LOOP, Client, Feature, call

_ANSWER = """
from pydantic import BaseModel
from typing import Literal
class Answer(BaseModel):
    city: Literal["Oslo", "Rome"]
    is_far: bool
"""
"""Words and a truth, because a model with random weights seldom ends a text or a number."""

_AGENTS = (
    _ANSWER
    + """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
import asyncio
set_tracing_disabled(True)
@function_tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
settings = ModelSettings(extra_headers={"x-dynamo-session-id": SESSION}, max_tokens=200)
def agent(**options):
    return Agent(name="a", model=OpenAIChatCompletionsModel("tiny", client), model_settings=settings, **options)
"""
)

OPENAI_AGENTS = Client(
    "openai-agents",
    "agents",
    _AGENTS,
    (
        Feature(
            "tool loop, 3 rounds with 2 parallel calls",
            "done = Runner.run_sync(agent(tools=[add]), 'Add')\nassert done.final_output.strip() == 'It is 10.', done",
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
            guided=GUIDED,
        ),
    ),
)

_LANGGRAPH = (
    _ANSWER
    + """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
model = ChatOpenAI(model="tiny", base_url=f"{URL}/v1", api_key="none", max_tokens=200, max_retries=0,
                   default_headers={"x-dynamo-session-id": SESSION})
"""
)

LANGGRAPH = Client(
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
            "tool loop by `/v1/responses`",
            "responses = model.model_copy(update={'use_responses_api': True})\n"
            "done = create_agent(responses, [add]).invoke({'messages': [('user', 'Add')]})\n"
            "assert done['messages'][-1].text.strip() == 'It is 10.', done",
            replies=LOOP,
        ),
        Feature(
            "`with_structured_output(function_calling)`",
            "form = model.with_structured_output(Answer, method='function_calling')\n"
            "assert isinstance(form.invoke('Where?'), Answer)",
            "500 on the modelled engine",
            guided={"tool_calls": [call("Answer", city="Oslo", is_far=False)]},
        ),
        Feature(
            "`tool_choice='any'`",
            "assert model.bind_tools([add], tool_choice='any').invoke('Add').tool_calls",
            "500 on the modelled engine",
            guided={"tool_calls": [call("add", a=3, b=7)]},
        ),
    ),
)

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

SMOLAGENTS = Client(
    "smolagents",
    "smolagents",
    _SMOLAGENTS,
    (
        Feature(
            "ToolCallingAgent",
            "assert str(ToolCallingAgent([add], model, max_steps=4).run('Add 3 and 7')) == '10'",
            "500, and three retries",
            (
                {"tool_calls": [call("add", a=3, b=7)]},
                {"tool_calls": [call("final_answer", answer="10")]},
            ),
        ),
        Feature(
            "CodeAgent",
            "from smolagents import CodeAgent\n"
            "agent = CodeAgent([add], model, max_steps=1)\n"
            "agent.prompt_templates['system_prompt'] = 'You write code.'  # its own is too long for the workers\n"
            "assert str(agent.run('Add 3 and 7')) == '10'",
            "a stop string leaked, and the code did not parse",
            ({"content": "I add.\n<code>\nfinal_answer(add(3, 7))\n</code>"},),
        ),
    ),
)

_PYDANTIC = (
    _ANSWER
    + """
import asyncio
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
settings = {"extra_headers": {"x-dynamo-session-id": SESSION}, "max_tokens": 200}
"""
)

PYDANTIC_AI = Client(
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
            "tool loop by `/v1/responses`",
            "from pydantic_ai.models.openai import OpenAIResponsesModel\n"
            "responses = OpenAIResponsesModel('tiny', provider=OpenAIProvider(base_url=f'{URL}/v1', api_key='none'))\n"
            "done = Agent(responses, tools=[add]).run_sync('Add', model_settings=settings)\n"
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
            guided={"tool_calls": [call("final_result", city="Oslo", is_far=False)]},
        ),
    ),
)

_LLAMA = (
    _ANSWER
    + """
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
import asyncio
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
model = OpenAILike(model="tiny", api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_retries=0,
                   is_function_calling_model=True, max_tokens=200,
                   default_headers={"x-dynamo-session-id": SESSION})
"""
)

LLAMA_INDEX = Client(
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
            guided={"tool_calls": [call("Answer", city="Oslo", is_far=False)]},
        ),
    ),
)
