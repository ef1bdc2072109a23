"""What is tried with litellm, which speaks for many APIs, and with the API of Anthropic."""

from __future__ import annotations

from benchmarks.clients.feature import CALLS, LOOP, TOOL, Client, Feature

_LITELLM = f"""
import json, litellm
tool = {TOOL!r}
def ask(messages, **options):
    return litellm.completion("openai/tiny", messages, api_base=f"{{URL}}/v1", api_key="none", max_tokens=200,
                              num_retries=0, extra_headers={{"x-dynamo-session-id": SESSION}}, **options)
"""

_ADAPTER = (
    "messages = [{{'role': 'user', 'content': 'Good morning'}}]\n"
    "done = litellm.completion('{name}/tiny', messages, api_base={base}, api_key='none', max_tokens=20,\n"
    "                          num_retries=0, extra_headers={{'x-dynamo-session-id': SESSION}})\n"
    "assert done.choices[0].message.content and done.choices[0].finish_reason, done"
)

LITELLM = Client(
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
        Feature("adapter `hosted_vllm`", _ADAPTER.format(name="hosted_vllm", base="f'{URL}/v1'")),
        Feature("adapter `nvidia_nim`", _ADAPTER.format(name="nvidia_nim", base="f'{URL}/v1'")),
        Feature("adapter `anthropic`", _ADAPTER.format(name="anthropic", base="URL")),
    ),
)

_ANTHROPIC = """
from anthropic import Anthropic
client = Anthropic(base_url=URL, api_key="none", max_retries=0, default_headers={"x-dynamo-session-id": SESSION})
hello = [{"role": "user", "content": "Good morning"}]
tool = {"name": "add", "description": "Add two numbers.", "input_schema": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}
"""

ANTHROPIC = Client(
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
            guided=CALLS[0],
        ),
    ),
)
