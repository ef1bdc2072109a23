"""How requests are read that the frontend has refused. The frontend itself is asked in tests/integration."""

import base64
import json
from typing import Any

import pytest

from router.status_relay.mending import (
    CannotMendError,
    loses_parts,
    mended_request,
    stops_made_visible,
    with_known_model,
)

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hello"}


def mended(path: str, body: dict[str, Any], reason: str = "") -> dict[str, Any]:
    found = mended_request(path, json.dumps(body).encode(), reason)
    assert found is not None
    request: dict[str, Any] = json.loads(found)
    return request


def message(path: str, sent: dict[str, Any]) -> Any:
    messages = mended(path, {"messages": [USER, sent]})["messages"]
    return messages[1] if len(messages) == 2 else messages[1:]


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"command": "ls', {"arguments": '{"command": "ls'}),
        ('{"command": "ls"} and', {"arguments": '{"command": "ls"} and'}),
        ("{'command': 'ls'}", {"arguments": "{'command': 'ls'}"}),
        ('"ls"', {"arguments": "ls"}),
        ("[1]", {"arguments": [1]}),
        ('{"command": "a\nb"}', {"command": "a\nb"}),
        (json.dumps(json.dumps({"command": "ls"})), {"command": "ls"}),
        ("null", {}),
        (None, {}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"command": "\\ud83d"}', {"command": "\ufffd"}),
    ],
)
def test_arguments_become_an_object_and_none_of_them_is_lost(arguments: Any, read: dict[str, Any]) -> None:
    chat = message(CHATS, called(arguments))["tool_calls"][0]["function"]["arguments"]
    item = mended(RESPONSES, {"input": [{"type": "function_call", "name": "run", "arguments": arguments}]})
    assert json.loads(chat) == json.loads(item["input"][0]["arguments"]) == read


def test_a_tool_use_whose_input_is_no_object_becomes_one() -> None:
    use = {"type": "tool_use", "id": "t", "name": "run", "input": '{"a'}
    found = message(MESSAGES, {"role": "assistant", "content": [use]})
    assert found["content"] == [{**use, "input": {"arguments": '{"a'}}]


def test_what_is_right_is_not_sent_again() -> None:
    right = {"messages": [USER, called('{"a": 1}')], "max_tokens": 4}
    assert mended_request(CHATS, json.dumps(right).encode(), "too long") is None
    assert mended_request(CHATS, b"no JSON", "no JSON") is None
    assert mended_request(CHATS, b"[1]", "no object") is None


def test_halves_of_characters_are_replaced_and_whole_ones_stay() -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud83d b\\ude00 \\ud83d\\ude00 \xc3\xa9 \xc3"}]}'
    found = mended_request(CHATS, body, "")
    assert found is not None
    assert json.loads(found)["messages"][0]["content"] == "a\ufffd b\ufffd \U0001f600 \xe9 \ufffd"


SCREEN = {"type": "computer_screenshot", "image_url": "data:image/png;base64,aa"}
THOUGHT = {"type": "thinking", "thinking": "let me see", "signature": "s"}
USE = {"type": "tool_use", "id": "c1", "name": "run", "input": {"a": 1}}
TEXT = {"type": "text", "text": "four"}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"content": [THOUGHT, TEXT]}, {"content": [TEXT], "reasoning_content": "let me see"}),
        ({"content": [{"type": "reasoning", "text": "r"}]}, {"content": "", "reasoning_content": "r"}),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, TEXT]}, {"content": [TEXT]}),
        ({"content": [USE]}, {"content": None, "tool_calls": [call('{"a": 1}')]}),
        ({"content": [TEXT, USE], "tool_calls": [call("{}")]}, {"content": [TEXT], "tool_calls": [call("{}")]}),
        ({"content": [{"type": "output_text", "text": "four", "annotations": []}]}, {"content": [TEXT]}),
        ({"content": ["four"]}, {"content": [TEXT]}),
        ({"content": {"text": "four"}}, {"content": [TEXT]}),
        ({"content": "x", "reasoning": "r", "reasoning_content": "r"}, {"content": "x", "reasoning_content": "r"}),
        (
            {"content": None, "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}]},
            {"content": None, "tool_calls": [{**call('{"input": "ls"}'), "id": "c"}]},
        ),
        (
            {"content": "", "tool_calls": [{"type": "tool_call", "name": "run", "args": {"a": 1}}]},
            {"content": "", "tool_calls": [{**call('{"a": 1}'), "id": "call_1_0"}]},
        ),
    ],
)
def test_parts_of_other_apis_in_a_chat(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert message(CHATS, {"role": "assistant", **sent}) == {"role": "assistant", **read}


def test_results_among_the_parts_of_a_user_are_messages_of_the_tool() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "four"}
    assert message(CHATS, {"role": "user", "content": [result]}) == told
    assert message(CHATS, {"role": "user", "content": [result, "go"]}) == [
        told,
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ({"ok": True}, '{"ok": true}'), (5, "5"), ([1, 2], "[1, 2]"), (["a", TEXT], "a\nfour")],
)
def test_the_result_of_a_tool_may_be_anything(content: Any, text: str) -> None:
    assert message(CHATS, {"role": "tool", "tool_call_id": "c1", "content": content})["content"] == text


def test_results_without_an_id_belong_to_the_calls_in_their_order() -> None:
    calls = [{**call("{}"), "id": name} for name in ("a", "b")]
    tool = {"role": "tool", "content": "x"}
    found = mended(CHATS, {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}, tool, tool]})
    assert [each.get("tool_call_id") for each in found["messages"]] == [None, "a", "b"]


DOCUMENT = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "a text"}}
FILE = f"data:text/plain;base64,{base64.b64encode(b'a text').decode()}"


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHATS, {"messages": [{"role": "user", "content": [DOCUMENT]}]}, "T\na text"),
        (MESSAGES, {"messages": [{"role": "user", "content": [DOCUMENT]}]}, "T\na text"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": FILE}}]}]}, "a text"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_file", "filename": "f", "file_data": FILE}]}]},
            "f\na text",
        ),
    ],
)
def test_documents_of_text_are_text(path: str, body: dict[str, Any], text: str) -> None:
    found = mended(path, body)
    assert (found.get("messages") or found["input"])[0]["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHATS, {"messages": [USER, {"role": "user", "content": [TEXT, {"type": "new"}]}]}, "messages[1].content[1]"),
        (CHATS, {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0]"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]},
            "messages[0].content[0]",
        ),
        (RESPONSES, {"input": [USER, {"type": "compaction_summary", "encrypted_content": "x"}]}, "input[1]"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "new"}]}]}, "input[0].content[0]"),
        (RESPONSES, {"input": [USER, {"type": "function_call", "call_id": "c"}]}, "input[1]"),
        (RESPONSES, {"input": [{"type": "message", "content": "x"}]}, "input[0]"),
        (RESPONSES, {"input": [{"type": "computer_call_output", "call_id": "c", "output": SCREEN}]}, "input[0]"),
        (CHATS, {"messages": [USER, {"role": "critic", "content": "x"}]}, "messages[1]"),
        (CHATS, {"messages": [{"role": "user", "content": [USE]}]}, "messages[0]"),
        (CHATS, {"messages": [{"role": "tool", "tool_call_id": "c", "content": [SCREEN]}]}, "messages[0]"),
    ],
)
def test_what_cannot_be_read_is_named(path: str, body: dict[str, Any], place: str) -> None:
    with pytest.raises(CannotMendError) as caught:
        mended_request(path, json.dumps(body).encode(), "")
    assert str(caught.value).startswith(f"{place}: ")


def test_the_parameter_that_cannot_be_read_is_named() -> None:
    with pytest.raises(CannotMendError, match="functions is not supported; send tools"):
        mended(CHATS, {"messages": [USER], "functions": [{"name": "run"}]})


def test_a_refusal_by_the_chat_template_has_a_reason() -> None:
    with pytest.raises(CannotMendError, match="chat template"):
        mended_request(CHATS, json.dumps({"messages": [USER]}).encode(), "Invalid request")


def test_the_picture_that_a_model_of_text_cannot_see_is_named() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    body = {"messages": [USER, {"role": "user", "content": [TEXT, picture]}]}
    with pytest.raises(CannotMendError, match=r"messages\[1\].content\[1\]: .*text only"):
        mended(CHATS, body)


@pytest.mark.parametrize(
    ("item", "read"),
    [
        ({"type": "web_search_call", "status": "completed"}, None),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            {"type": "function_call", "call_id": "c", "name": "patch", "arguments": '{"input": "x"}'},
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "function_call", "call_id": "c", "name": "local_shell", "arguments": '{"command": ["ls"]}'},
        ),
        (
            {"type": "local_shell_call_output", "id": "c", "output": "x"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ),
        (
            {"type": "shell_call", "id": "i", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": '{"commands": ["ls"]}'},
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file"}},
            {"type": "function_call", "call_id": "c", "name": "apply_patch", "arguments": '{"type": "delete_file"}'},
        ),
        (
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x"}]},
            {"type": "function_call_output", "call_id": "c", "output": '[{"stdout": "x"}]'},
        ),
        (
            {"type": "code_interpreter_call", "id": "c", "code": "1", "container_id": "x", "outputs": [{"logs": "1"}]},
            [
                {"type": "function_call", "call_id": "c", "name": "code_interpreter", "arguments": '{"code": "1"}'},
                {"type": "function_call_output", "call_id": "c", "output": '[{"logs": "1"}]'},
            ],
        ),
        (
            {"type": "mcp_call", "id": "c", "name": "look", "server_label": "s", "arguments": "{}", "output": "x"},
            [
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
        ),
        ({"type": "image_generation_call", "id": "c", "result": "aa"}, None),
        ({"type": "mcp_list_tools", "id": "c", "tools": []}, None),
        ({"type": "function_call_output", "call_id": "c", "output": None}, {"output": ""}),
        ({"role": "assistant", "content": [TEXT]}, {"role": "assistant", "content": "four"}),
        ({"role": "user", "content": [TEXT]}, {"role": "user", "content": [{"type": "input_text", "text": "four"}]}),
    ],
)
def test_items_that_dynamo_does_not_know(item: dict[str, Any], read: Any) -> None:
    found = mended(RESPONSES, {"input": [item, USER]})["input"][:-1]
    if isinstance(read, list):
        assert found == read
        return
    assert found == ([] if read is None else [{**(item if "output" in read and len(read) == 1 else {}), **read}])


@pytest.mark.parametrize("kind", ["item_reference", "compaction"])
def test_an_item_that_only_its_provider_can_read_is_named(kind: str) -> None:
    body = json.dumps({"input": [USER, {"type": kind, "id": "i"}]}).encode()
    assert loses_parts(RESPONSES, body)
    with pytest.raises(CannotMendError, match=rf"input\[1\]: .*{kind}"):
        mended_request(RESPONSES, body, "")


@pytest.mark.parametrize("kind", ["mcp_call", "code_interpreter_call", "computer_call_output", "custom_tool_call"])
def test_the_result_of_a_tool_is_not_lost(kind: str) -> None:
    assert loses_parts(RESPONSES, json.dumps({"input": [{"type": kind}]}).encode())


def test_what_a_user_says_is_not_lost() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}}
    body = json.dumps({"messages": [USER, {"role": "user", "content": [audio]}]}).encode()
    assert loses_parts(CHATS, body)
    with pytest.raises(CannotMendError, match=r"messages\[1\].content\[0\]: .*input_audio"):
        mended_request(CHATS, body, "")


def test_calls_of_other_apis_at_messages() -> None:
    used = {"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "s", "input": {"a": 1}}
    told = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [TEXT]}
    assert message(MESSAGES, {"role": "assistant", "content": [used, told, TEXT]}) == [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "m", "name": "look", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "m", "content": [TEXT]}]},
        {"role": "assistant", "content": [TEXT]},
    ]
    assert message(MESSAGES, called('{"a": 1}'))["content"] == [USE]
    assert message(MESSAGES, {"role": "tool", "tool_call_id": "c1", "content": "x"}) == {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}],
    }


def test_the_older_form_of_calls_is_not_lost() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "run", "arguments": "{}"}},
        {"role": "function", "name": "run", "content": "x"},
    ]
    assert loses_parts(CHATS, json.dumps({"messages": messages}).encode())
    called_, told = mended(CHATS, {"messages": messages})["messages"][1:]
    assert called_ == {"role": "assistant", "content": None, "tool_calls": [{**call("{}"), "id": "call_1_0"}]}
    assert told == {"role": "tool", "name": "run", "tool_call_id": "call_1_0", "content": "x"}


def test_items_among_the_messages_of_a_chat() -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "run", "arguments": "{}"}
    assert message(CHATS, item) == called("{}")
    output = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    assert message(CHATS, output) == {"role": "tool", "tool_call_id": "c1", "content": "x"}


def test_a_text_that_names_such_an_item_loses_nothing() -> None:
    quoted = json.dumps({"type": "shell_call"})
    assert not loses_parts(RESPONSES, json.dumps({"input": [{"role": "user", "content": quoted}]}).encode())


def parameters(**sent: Any) -> dict[str, Any]:
    names = ", ".join(f"`{name}`" for name in sent)
    found = mended(CHATS, {"messages": [USER], **sent}, f"Validation: Unsupported parameter(s): {names}")
    del found["messages"]
    return found


def test_parameters_that_change_nothing_are_left_out_and_others_are_translated() -> None:
    assert parameters(verbosity="low", prompt_cache_retention="24h", usage={"include": True}) == {}
    assert parameters(enable_thinking=False) == {"chat_template_kwargs": {"enable_thinking": False}}
    assert parameters(reasoning={"effort": "high"}) == {"reasoning_effort": "high"}
    assert parameters(structured_outputs={"json": {"type": "object"}}) == {"guided_json": {"type": "object"}}
    assert parameters(best_of=None) == parameters(best_of=1) == {}
    both = {"messages": [USER], "best_of": 2, "n": 2}
    assert mended(CHATS, both, "Unsupported parameter(s): `best_of`") == {"messages": [USER], "n": 2}
    with pytest.raises(CannotMendError, match="truncate_prompt_tokens"):
        parameters(truncate_prompt_tokens=5)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"stop": []}, {}),
        ({"stream_options": {"include_usage": True}}, {}),
        ({"max_tokens": 4.0}, {"max_tokens": 4}),
        ({"tools": [], "tool_choice": "auto"}, {}),
        ({"stop": ["x", ""], "seed": 1.0}, {"stop": ["x"], "seed": 1}),
        (
            {"tools": [{"name": "run", "input_schema": {}}], "tool_choice": {"type": "any"}},
            {
                "tools": [{"type": "function", "function": {"name": "run", "parameters": {}}}],
                "tool_choice": "required",
            },
        ),
    ],
)
def test_empty_options_and_those_of_other_apis(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert mended(CHATS, {"messages": [USER], **sent}) == {"messages": [USER], **read}


def test_tools_of_a_provider_are_left_out_beside_the_clients_own() -> None:
    own = {"type": "function", "name": "run", "parameters": {}}
    search = {"type": "web_search"}
    assert mended(RESPONSES, {"input": "x", "tools": [search, own]})["tools"] == [own]
    with pytest.raises(CannotMendError, match=r"tools\[0\]"):
        mended(RESPONSES, {"input": "x", "tools": [search]})


def test_functions_of_other_apis_at_messages() -> None:
    function = {"name": "run", "description": "d", "parameters": {"type": "object"}}
    sent = {"messages": [USER], "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    found = mended(MESSAGES, sent)
    assert found["tools"] == [{"name": "run", "description": "d", "input_schema": {"type": "object"}}]
    assert found["tool_choice"] == {"type": "any"}


def test_stop_strings_beside_tools() -> None:
    chat = {"stop": ["x"], "tools": [{}], "nvext": {"extra_fields": ["timing"]}}
    body, stops = stops_made_visible(CHATS, json.dumps(chat).encode())
    assert (json.loads(body)["nvext"], stops) == ({"extra_fields": ["timing", "stop_reason"]}, ())
    body, stops = stops_made_visible(MESSAGES, b'{"stop_sequences": ["x", ""], "tools": [{}]}')
    assert (json.loads(body), stops) == ({"tools": [{}]}, ("x",))
    for other in (b'{"stop": ["x"]}', b'{"tools": [{}]}', b'{"stop": null, "tools": [{}]}', b'"stop" "tools"'):
        assert stops_made_visible(CHATS, other) == (other, ())


ALIASES = [("claude-*", "tiny"), ("*", "other")]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model" : "claude-x", "messages": []}', "tiny"),
        (b'{"model": "gpt", "input": {"model": "claude-x"}}', "other"),
        (b'{"input": "\\"model\\": \\"claude-x\\"", "model": "tiny"}', "other"),
    ],
)
def test_the_name_of_a_model_may_be_a_pattern(body: bytes, name: str) -> None:
    found = json.loads(with_known_model(body, ALIASES))
    assert found == {**json.loads(body), "model": name}


@pytest.mark.parametrize(
    "body", [b'{"model": "tiny"}', b'{"x": {"model": "claude-x"}, "model": "y"}', b'"model": "claude-x"']
)
def test_other_names_of_models_stay(body: bytes) -> None:
    assert with_known_model(body, ALIASES[:1]) == with_known_model(body, ()) == body
