"""What is tried with the package openai: the options of a request, and what is refused."""

from __future__ import annotations

from benchmarks.clients.feature import (
    CALLS,
    CONTEXT_TOKENS,
    FAULTS,
    GUIDED,
    SCHEMA,
    TOOL,
    Client,
    Feature,
    call,
)

_LAMP = {
    "type": "function",
    "function": {
        "name": "lamp",
        "parameters": {
            "type": "object",
            "properties": {"is_on": {"type": "boolean"}},
            "required": ["is_on"],
            "additionalProperties": False,
        },
    },
}
"""A tool whose call a model with random weights can end."""

_LIT = {"tool_calls": [call("lamp", is_on=True)]}

_OPENAI = f"""
import json
from openai import APIError, APIStatusError, OpenAI
named = {{"x-dynamo-session-id": SESSION}}
client = OpenAI(base_url=f"{{URL}}/v1", api_key="none", max_retries=0, default_headers=named)
hello = [{{"role": "user", "content": "Good morning"}}]
tool, schema, lamp = {TOOL!r}, {SCHEMA!r}, {_LAMP!r}
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
def text(**options):
    return chat(**options).choices[0].message.content
def is_lamp(name, arguments):
    assert name == "lamp" and isinstance(json.loads(arguments)["is_on"], bool), (name, arguments)
def fits(content):
    value = json.loads(content)
    assert value.keys() == {{"city", "is_far"}} and value["city"] in ("Oslo", "Rome"), value
    assert isinstance(value["is_far"], bool), value
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
        Feature(
            "`tool_choice` required",
            "calls = chat(tools=[lamp], tool_choice='required', max_tokens=600).choices[0].message.tool_calls\n"
            "assert calls\n"
            "for call in calls: is_lamp(call.function.name, call.function.arguments)",
            _REASONLESS,
            guided=_LIT,
        ),
        Feature(
            "`tool_choice` with a name",
            "named = {'type': 'function', 'function': {'name': 'lamp'}}\n"
            "(call,) = chat(tools=[tool, lamp], tool_choice=named, max_tokens=600).choices[0].message.tool_calls\n"
            "is_lamp(call.function.name, call.function.arguments)",
            _REASONLESS,
            guided=_LIT,
        ),
        Feature(
            "`tool_choice` required, streamed",
            "chunks = streamed(tools=[lamp], tool_choice='required', max_tokens=600)\n"
            "deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]\n"
            "parts = [call.function for delta in deltas for call in delta.tool_calls or () if call.index == 0]\n"
            "is_lamp(''.join(part.name or '' for part in parts), ''.join(part.arguments or '' for part in parts))",
            _REASONLESS,
            guided=_LIT,
        ),
        Feature("`response_format` with a schema", "fits(text(response_format=form))", "400", guided=GUIDED),
        Feature(
            "`response_format`, streamed",
            "parts = [chunk.choices[0].delta.content for chunk in streamed(response_format=form) if chunk.choices]\n"
            "fits(''.join(part or '' for part in parts))",
            _REASONLESS,
            guided=GUIDED,
        ),
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
        Feature(
            "`seed` at temperature 0",
            "assert text(seed=7, temperature=0) == text(seed=8, temperature=0) == text(temperature=0)",
            "no effect, and always local",
        ),
        Feature(
            "`seed` at temperature 1 gives the same text, and another seed another one, or is refused with the reason",
            "try:\n"
            "    texts = {text(seed=7, temperature=1) for _ in range(3)}\n"
            "    assert len(texts) == 1, texts\n"
            "    samples = texts != {text(temperature=0)}  # the modelled engine does not\n"
            "    assert not samples or text(seed=8, temperature=1) not in texts, texts\n"
            "except APIStatusError as error:\n"
            "    assert error.status_code == 400 and 'enable_deterministic_inference' in str(error), error",
            "four texts on SGLang",
        ),
        Feature(
            "prompt + `max_tokens` beyond the context ends with `length`, chat",
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
        Feature("a prompt beyond the workers' context gets both numbers, chat", "numbers(refused(messages=long))"),
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
            "a session id of 600 characters is refused with the limit, chat",
            "error = refused(extra_headers={'x-dynamo-session-id': 'x' * 600})\n"
            "assert error.status_code == 400 and '256' in str(error), error",
        ),
        Feature(
            "the same, streamed",
            "error = refused(stream=True, extra_headers={'x-dynamo-session-id': 'x' * 600})\n"
            "assert error.status_code == 400 and '256' in str(error), error",
            _REASONLESS,
        ),
        Feature(
            "five stop strings",
            "stops = ['aa', 'bb', 'cc', 'dd', 'ee']\n"
            "assert text(temperature=0, max_tokens=9, stop=stops) == text(temperature=0, max_tokens=9)",
            '500 "Failed to generate completions"',
        ),
        Feature(
            "`logit_bias`",
            "assert text(temperature=0, logit_bias={'70': 100}) == text(temperature=0)",
            fault=FAULTS,
        ),
        Feature(
            "`echo` is refused with the reason",
            "try:\n"
            "    client.completions.create(model='tiny', prompt='Good', max_tokens=5, echo=True)\n"
            "except APIStatusError as error:\n"
            "    assert error.status_code == 400 and 'echo' in str(error), error\n"
            "else: raise AssertionError('it was accepted')",
            '500 "Failed to fold completions stream"',
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
