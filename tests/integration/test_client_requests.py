"""What agents send through the relay to Dynamo's frontend: requests that are mended, and calls that are no calls."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from ampd.tiny_model import tiny_model_path
from tests.harness.graph import HELLO, MODEL, Graph, profile, session
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHATS, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
USER = HELLO[0]
FUNCTION = {"name": "run", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
TOOLS = {
    CHATS: [{"type": "function", "function": FUNCTION}],
    MESSAGES: [{"name": "run", "input_schema": FUNCTION["parameters"]}],
    RESPONSES: [{"type": "function", **FUNCTION}],
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "rm -rf build/old/cache"}}\n</tool_call>'
BROKEN = CALL.replace("/old", '"old')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(graph: Graph) -> AsyncIterator[httpx.AsyncClient]:
    perf = profile(graph.folder, prefill_s=0.005, long_prefill_s=0.01, step_s=0.001)
    replies = graph.folder / "replies.jsonl"
    texts = {"calls": f"I write it. {CALL}", "broken": BROKEN, "thinks": f"<think>Hm.</think>{BROKEN}"}
    replies.write_text("\n".join(json.dumps({"session": name, "text": text}) for name, text in texts.items()))
    model = strict_model(graph.folder)
    names = "--model-name", f"{MODEL},gpt-x", "--model", str(model), "--dyn-reasoning-parser", "qwen3"
    coordinator = graph.start_coordinator("always-remote", *names)
    graph.start_frontend("--model-alias", f"claude-*={MODEL}", status_relay=True)
    for role in ("prefill", "decode"):
        await graph.new_worker(role, perf, "--replies", str(replies))
    await graph.until_answers([coordinator])
    async with httpx.AsyncClient(base_url=graph.url, timeout=PATIENCE_S) as client:
        yield client


LOOP = "{%- for message in messages %}"
STRICT = (
    "{%- if message.role == 'system' and not loop.first %}{{- raise_exception('The system comes first') }}{%- endif %}"
)


def strict_model(folder: Path) -> Path:
    """The model with a template that takes a message of the system at the first place only."""
    model = Path(shutil.copytree(tiny_model_path(), folder / "strict"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    assert LOOP in settings["chat_template"]
    settings["chat_template"] = settings["chat_template"].replace(LOOP, LOOP + STRICT)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "run", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function, **more}],
    }


def said(content: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOL = {"role": "tool", "tool_call_id": "c", "content": "error"}
TEXT = {"type": "text", "text": "four"}
USE = {"type": "tool_use", "id": "t", "name": "run", "input": {"command": "ls"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a text"}}
MENDED: list[tuple[str, list[dict[str, Any]]]] = [
    *(
        (CHATS, [called(arguments), TOOL])
        for arguments in (
            '{"command": "ls',
            '"ls"',
            '{"command": "a\nb"}',
            None,
            "[1]",
            '{"a": NaN}',
            '{"a": "\\ud83d"}',
        )
    ),
    (CHATS, [said([{"type": "thinking", "thinking": "t", "signature": "s"}, TEXT])]),
    (CHATS, [said([{"type": "reasoning", "text": "t"}, TEXT])]),
    (CHATS, [said([TEXT, USE]), said([{"type": "tool_result", "tool_use_id": "t", "content": "x"}], "user")]),
    (CHATS, [said([{"type": "output_text", "text": "four", "annotations": []}])]),
    (CHATS, [said("x \ud83d")]),
    (CHATS, [said([DOCUMENT], "user")]),
    (CHATS, [said(None, "user"), said("x", "model")]),
    (CHATS, [said("x", reasoning="r", reasoning_content="r")]),
    (CHATS, [called("{}"), {**TOOL, "content": None}]),
    (CHATS, [called("{}"), {"role": "tool", "content": {"ok": True}}]),
    (CHATS, [called("{}", id=None), {"role": "tool", "content": "x"}]),
    (MESSAGES, [said([{"type": "thinking", "thinking": "t"}, TEXT])]),
    (MESSAGES, [said([{**USE, "input": "{"}]), said([{"type": "tool_result", "tool_use_id": "t"}], "user")]),
    (MESSAGES, [said([USE]), said([{"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]}], "user")]),
    (MESSAGES, [said([DOCUMENT], "user"), said([]), said("b", "developer"), said("x \ud83d")]),
    (RESPONSES, [{"type": "function_call", "call_id": "c", "name": "run", "arguments": "{"}]),
    (RESPONSES, [{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}]),
    (RESPONSES, [{"type": "web_search_call", "status": "completed"}, {"type": "ghost_snapshot"}]),
    (
        RESPONSES,
        [said([TEXT]), said([TEXT], "user"), said(None), {"role": "tool", "tool_call_id": "c", "content": "x"}],
    ),
    (RESPONSES, [said("x \ud83d")]),
    (RESPONSES, [{"type": "function_call", "name": "run"}, {"type": "function_call_output", "output": "x"}]),
    (
        MESSAGES,
        [said([{**USE, "type": "mcp_tool_use", "server_name": "s"}, {"type": "mcp_tool_result", "content": "x"}])],
    ),
]


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str = "") -> httpx.Response:
    content = json.dumps({"model": MODEL, **body})  # with halves of characters, which the client would not send
    headers = {"content-type": "application/json", **(session(name) if name else {})}
    return await client.post(path, content=content, headers=headers)


def history(path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    whole = [USER, *messages, USER]
    return {"input" if path == RESPONSES else "messages": whole, "tools": TOOLS[path], limit: 2}


@pytest.mark.parametrize(("path", "messages"), MENDED)
async def test_a_history_is_mended(client: httpx.AsyncClient, path: str, messages: list[dict[str, Any]]) -> None:
    answer = await ask(client, path, history(path, messages))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("path", TOOLS)
async def test_what_the_system_says_in_the_middle_reaches_the_model(
    client: httpx.AsyncClient, path: str, role: str
) -> None:
    first = said("short", "system")
    bare, whole = [
        (await ask(client, path, history(path, [*before, said("word " * count, role), USER]))).json()["usage"]
        for before, count in (([], 1), ([first], 50))
    ]
    counts = [each.get("prompt_tokens") or each["input_tokens"] + cached(each) for each in (bare, whole)]
    assert counts[1] > counts[0] + 45


def cached(usage: dict[str, Any]) -> int:
    """Tokens that Anthropic's API does not count as input."""
    return int(usage.get("cache_read_input_tokens", 0))


LOST = [
    [
        {"type": f"{kind}_call", "id": "i", "call_id": "c", "status": "completed", **call},
        {"type": f"{kind}_call_output", "id": "o", "call_id": "c", "output": "word " * 50},
    ]
    for kind, call in (
        ("custom_tool", {"name": "patch", "input": "x"}),
        ("local_shell", {"action": {"type": "exec", "command": ["ls"], "env": {}}}),
        ("mcp", {"name": "look", "server_label": "s", "arguments": "{}"}),
    )
]


@pytest.mark.parametrize("items", LOST, ids=["custom tool", "local shell", "tool of a server"])
async def test_an_item_that_dynamo_leaves_out_reaches_the_model(
    client: httpx.AsyncClient, items: list[dict[str, Any]]
) -> None:
    bare, whole = [(await ask(client, RESPONSES, history(RESPONSES, each))).json() for each in ([], items)]
    assert whole["usage"]["input_tokens"] > bare["usage"]["input_tokens"] + 50


PARAMETERS: list[dict[str, Any]] = [
    {"reasoning": {"effort": "high"}, "verbosity": "low", "enable_thinking": False, "prompt_cache_retention": "24h"},
    {"stop": [], "stream_options": {"include_usage": True}, "cache_control": {"type": "ephemeral"}, "tools": []},
    {"usage": {"include": True}, "safety_identifier": "x", "max_tokens": 4.0, "priority": 1, "best_of": 1},
]


@pytest.mark.parametrize("more", PARAMETERS)
async def test_a_parameter_is_left_out(client: httpx.AsyncClient, more: dict[str, Any]) -> None:
    answer = await ask(client, CHATS, {"messages": HELLO, "max_tokens": 2, **more})
    assert answer.status_code == 200, answer.text
    more = {name: value for name, value in more.items() if name not in ("tools", "enable_thinking", "reasoning")}
    answer = await ask(client, COMPLETIONS, {"prompt": "hello", "max_tokens": 2, **more})
    assert answer.status_code == 200, answer.text


async def test_max_tool_calls_is_left_out(client: httpx.AsyncClient) -> None:
    answer = await ask(client, RESPONSES, {"input": "x", "max_output_tokens": 2, "max_tool_calls": 5})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHATS, {"messages": [said([TEXT, {"type": "new"}], "user")]}, "messages[0].content[1]"),
        (CHATS, {"messages": HELLO, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (CHATS, {"messages": HELLO, "functions": [FUNCTION]}, "functions"),
        (CHATS, {"messages": HELLO, "functions": [{"name": "run"}]}, "functions is not supported; send tools"),
        (CHATS, {"messages": [USER, said([SOUND], "user")]}, "messages[1].content[0]"),
        (CHATS, {"messages": [USER, said("x", "critic")]}, "messages[1]"),
        (RESPONSES, {"input": [USER, {"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[1]"),
        (RESPONSES, {"input": [USER, said([SOUND], "user")]}, "input[1].content[0]"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            CHATS,
            {
                "messages": [
                    USER,
                    said([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}], "user"),
                ]
            },
            "messages[1].content[0]: this model is served for text only",
        ),
        (
            MESSAGES,
            {"messages": HELLO, "max_tokens": 2, "tools": [{"type": "web_search_20250305", "name": "w"}]},
            "tools[0]",
        ),
        (RESPONSES, {"input": [{"type": "compaction_summary", "encrypted_content": "x"}]}, "input[0]"),
        (RESPONSES, {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
    ],
)
async def test_the_rest_is_a_400_with_its_reason(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], reason: str
) -> None:
    answer = await ask(client, path, body)
    assert answer.status_code == 400
    assert reason in answer.text


CUTS: dict[str, list[dict[str, Any]]] = {
    CHATS: [{"max_tokens": 26}, {"max_tokens": 36}, {"stop": ["/old"]}],
    MESSAGES: [{"max_tokens": 26}, {"max_tokens": 36}],
    RESPONSES: [{"max_output_tokens": 26}, {"max_output_tokens": 36}],
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("path", "cut"), [(path, cut) for path in CUTS for cut in CUTS[path]])
async def test_a_call_that_is_cut_is_text(
    client: httpx.AsyncClient, path: str, cut: dict[str, Any], *, is_stream: bool
) -> None:
    body = {"input" if path == RESPONSES else "messages": HELLO, "tools": TOOLS[path], "stream": is_stream}
    usual = {"max_tokens": 200} if path == MESSAGES else {}
    whole = await ask(client, path, {**body, **usual}, "calls")
    assert "rm -rf build/old/cache" in whole.text
    assert marks(whole.text)
    answer = await ask(client, path, {**body, **usual, **cut}, "calls")
    assert answer.status_code == 200
    assert not marks(answer.text)
    assert "arguments" in answer.text, "as text"
    reasons = {CHATS: '"finish_reason":"length"', MESSAGES: '"stop_reason":"max_tokens"', RESPONSES: '"incomplete"'}
    assert ('"finish_reason":"stop"' if "stop" in cut else reasons[path]) in answer.text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["broken", "thinks"])
@pytest.mark.parametrize("path", TOOLS)
async def test_a_call_that_does_not_parse_is_text(
    client: httpx.AsyncClient, path: str, name: str, *, is_stream: bool
) -> None:
    body = {"input" if path == RESPONSES else "messages": HELLO, "tools": TOOLS[path], "stream": is_stream}
    answer = await ask(client, path, {**body, **({"max_tokens": 200} if path == MESSAGES else {})}, name)
    assert answer.status_code == 200
    assert not marks(answer.text)
    data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.json()]
    assert "".join(filter(None, (text_of(each) for each in data))) == BROKEN
    if path == RESPONSES:
        ended = data[-1]["response"] if is_stream else data[0]
        assert ended["output"][-1]["content"][0]["text"] == BROKEN
        assert [each.get("sequence_number", 0) for each in data] == list(range(len(data)))


def text_of(data: dict[str, Any]) -> str | None:
    """The text for the user in an event, or in an answer that is no stream."""
    match data:
        case {"choices": [{"message": {"content": text}} | {"delta": {"content": text}}]}:
            return str(text)
        case {"type": "message", "content": [*_, {"text": str(text)}]}:
            return text
        case {"type": "content_block_delta", "delta": {"text": str(text)}}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
        case {"output": [*_, {"content": [{"text": str(text)}]}]}:
            return text
    return None


def marks(text: str) -> bool:
    """Whether an answer has a call."""
    return any(f'"type":"{kind}"' in text for kind in ("tool_use", "function_call")) or '"tool_calls":[' in text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_of_messages_ends_the_text_and_cuts_no_call(
    client: httpx.AsyncClient, *, is_stream: bool
) -> None:
    body = {"messages": HELLO, "tools": TOOLS[MESSAGES], "stream": is_stream, "max_tokens": 200}
    within = await ask(client, MESSAGES, {**body, "stop_sequences": ["/old"]}, "calls")
    assert "rm -rf build/old/cache" in within.text
    before = await ask(client, MESSAGES, {**body, "stop_sequences": ["te it"]}, "calls")
    assert not marks(before.text)
    assert '"stop_sequence":"te it"' in before.text.replace(": ", ":")


@pytest.mark.parametrize(("name", "status"), [(MODEL, 200), ("gpt-x", 200), ("claude-opus", 200), ("gpt-y", 404)])
async def test_a_model_has_several_names(client: httpx.AsyncClient, name: str, status: int) -> None:
    answer = await ask(client, CHATS, {"messages": HELLO, "max_tokens": 2, "model": name})
    assert answer.status_code == status
    listed = (await client.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} == {MODEL, "gpt-x"}
