"""Calls that were cut. The events are those of the frontend, of which tests/integration asks for real ones."""

import json
from typing import Any

import pytest

from router.status_relay.cut_calls import MendedStream, has_text_or_call, mended_body

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CUT = '{"name": "run", "arguments": {"command": "rm -rf build'


def call(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": f"c{index}", "type": "function", "function": {"name": "run", "arguments": arguments}}


def chunk(delta: dict[str, Any], reason: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    return event({"choices": [choice], **more})


def event(data: dict[str, Any]) -> bytes:
    head = f"event: {data['type']}\n" if "type" in data else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def read(path: str, *events: bytes, stops: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What a client gets in the end, whatever the parts are in which the events come."""
    whole = b"".join(events)
    found = []
    for size in (1, 7, 100, len(whole)):
        stream = MendedStream(path, stops)
        parts = [stream.passed_on(whole[at : at + size]) for at in range(0, len(whole), size)]
        lines = b"".join((*parts, stream.end())).decode().splitlines()
        found.append([json.loads(line[6:]) for line in lines if line.startswith("data: {")])
    assert all(each == found[0] for each in found)
    return found[0]


def calls_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for each in chunks for choice in each["choices"]]
    return [each for choice in choices for each in choice["delta"].get("tool_calls", ())]


@pytest.mark.parametrize("reason", ["length", "content_filter", None])
def test_only_a_round_that_ended_by_itself_has_its_last_call(reason: str | None) -> None:
    whole, cut = call(0, '{"command":"ls"}'), call(1, '{"command": "rm -rf build"}')
    events = chunk({"content": "I do"}), chunk({"tool_calls": [whole]}), chunk({"tool_calls": [cut]}, reason)
    found = read(CHATS, *events, b"data: [DONE]\n\n")
    assert calls_of(found) == [whole]
    assert found[-1]["choices"][0] == {"index": 0, "delta": {"content": CUT}, "finish_reason": reason}
    events = *events[:2], chunk({"tool_calls": [cut]}), chunk({}, "tool_calls")
    assert calls_of(read(CHATS, *events)) == [whole, cut]


def test_a_call_in_pieces_and_choices_beside_it() -> None:
    events = (
        chunk({"tool_calls": [call(0, '{"command"')]}),
        chunk({"tool_calls": [call(0, "{}")]}, index=1),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ': "rm -rf build"}'}}]}),
        chunk({}, "tool_calls", index=1),
        chunk({}, "length"),
    )
    found = read(CHATS, *events)
    assert calls_of(found) == [call(0, "{}")]
    assert found[-1]["choices"][0]["delta"] == {"content": CUT}


def test_a_stop_string_cuts_a_call_too() -> None:
    events = (
        chunk({"tool_calls": [call(0, '{"command": "rm -rf build"}')]}, "tool_calls", nvext={"stop_reason": "/old"}),
    )
    [found] = read(CHATS, *events)
    assert found["choices"] == [{"index": 0, "delta": {"content": CUT}, "finish_reason": "stop"}]


def test_text_comes_at_once_and_comments_while_a_call_is_held() -> None:
    stream = MendedStream(CHATS)
    text = chunk({"content": 'the text "tool_calls":[ is no call'})
    assert stream.passed_on(text) == text
    assert stream.passed_on(chunk({"tool_calls": [call(0, "{}")]})) == b""
    assert stream.passed_on(b": \n\n") == b": \n\n"
    assert stream.passed_on(chunk({}, "tool_calls")) == b""
    assert stream.end().count(b"data: ") == 2


def test_only_the_end_of_an_empty_answer_is_held() -> None:
    for events, is_empty in (
        ((chunk({"content": ""}), chunk({"reasoning_content": "Hm."}), chunk({}, "stop")), True),
        ((chunk({"content": "I do"}), chunk({}, "stop")), False),
        ((chunk({"content": "I do"}, "stop"),), False),
        ((chunk({"content": ""}), chunk({"tool_calls": [call(0, "{}")]}), chunk({}, "tool_calls")), False),
    ):
        stream = MendedStream(CHATS)
        passed_on = b"".join(map(stream.passed_on, events))
        assert stream.is_empty == is_empty
        if is_empty:
            assert passed_on == b"".join(events[:-1])
            [said] = stream.end("the call").split(b"\n\n")[:-1]
            assert json.loads(said[6:])["choices"][0] == {
                "index": 0,
                "delta": {"content": "the call"},
                "finish_reason": "stop",
            }


@pytest.mark.parametrize(
    ("body", "has_output"),
    [
        ({"choices": [{"message": {"content": None, "reasoning_content": "Hm."}}]}, False),
        ({"choices": [{"message": {"content": "yes"}}]}, True),
        ({"content": [{"type": "thinking", "thinking": "Hm."}]}, False),
        ({"content": [{"type": "text", "text": "yes"}]}, True),
        ({"output": [{"content": [{"type": "output_text", "logprobs": [], "text": ""}]}]}, False),
        ({"output": [{"content": [{"type": "output_text", "logprobs": [], "text": "yes"}]}]}, True),
        ({"output": [{"type": "function_call"}]}, True),
    ],
)
def test_an_answer_in_one_piece_may_be_empty(body: dict[str, Any], *, has_output: bool) -> None:
    assert has_text_or_call(json.dumps(body, separators=(",", ":")).encode()) == has_output


def test_an_answer_in_one_piece() -> None:
    whole, cut = call(0, "{}"), call(1, '{"command": "rm -rf build"}')
    choice = {"index": 0, "message": {"content": None, "tool_calls": [whole, cut]}, "finish_reason": "length"}
    found = json.loads(mended_body(CHATS, event({"choices": [choice]})[6:]))
    assert found["choices"][0] == {**choice, "message": {"content": CUT, "tool_calls": [whole]}}
    complete = event({"choices": [{**choice, "finish_reason": "tool_calls"}]})[6:]
    assert mended_body(CHATS, complete) == complete


def test_messages() -> None:
    use = {"type": "tool_use", "id": "t", "name": "run", "input": {"command": "rm -rf build"}}
    body = {"content": [use, {"type": "text", "text": "I"}], "stop_reason": "max_tokens"}
    found = json.loads(mended_body(MESSAGES, event(body)[6:]))
    assert found["content"] == [{"type": "text", "text": "I"}, {"type": "text", "text": CUT}]
    events: list[dict[str, Any]] = [
        {"type": "content_block_start", "index": 1, "content_block": {**use, "input": {}}},
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '{"command": '},
        },
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": '"rm -rf build"}'},
        },
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    ]
    assert read(MESSAGES, *map(event, events)) == events
    events[-1] = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}}
    found = read(MESSAGES, *map(event, events))
    assert found[0]["content_block"] == {"type": "text", "text": ""}
    assert [each["delta"] for each in found[1:3]] == [{"type": "text_delta", "text": text} for text in (CUT, "")]


def text_events(*texts: str) -> list[dict[str, Any]]:
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": text},
            "usage": {"n": number},
        }
        for number, text in enumerate(texts)
    ]
    return [block, *deltas, {"type": "content_block_stop", "index": 0}, {"type": "message_stop"}]


@pytest.mark.parametrize(
    ("texts", "text", "stop"),
    [
        (("one t", "wo three"), "one ", "two"),
        (("one t", "w", "enty"), "one twenty", None),
        (("one tw",), "one tw", None),
        (("three two",), "", "three"),
    ],
)
def test_stop_strings_end_the_text_of_messages(texts: tuple[str, ...], text: str, stop: str | None) -> None:
    found = read(MESSAGES, *map(event, text_events(*texts)), stops=("two", "three"))
    assert "".join(each["delta"].get("text", "") for each in found if "delta" in each) == text
    reasons = [each["delta"].get("stop_sequence") for each in found if each["type"] == "message_delta"]
    assert reasons == ([stop] if stop else [])
    assert [each["type"] for each in found[-1:]] == ["message_stop"]
    body = {"content": [{"type": "tool_use", "name": "run", "input": {}}, {"type": "text", "text": "".join(texts)}]}
    answer = json.loads(mended_body(MESSAGES, event(body)[6:], ("two", "three")))
    assert answer.get("stop_sequence") == stop
    assert len(answer["content"]) == (1 if stop else 2), "a call comes behind the text"


def test_responses() -> None:
    function = {"type": "function_call", "call_id": "c", "name": "run", "id": "f", "arguments": ""}
    complete = {**function, "arguments": '{"command": "rm -rf build"}'}
    place = {"output_index": 0, "item_id": "f"}
    events = [
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": function},
        {"type": "response.function_call_arguments.delta", "sequence_number": 3, **place, "delta": '{"command": "rm -'},
        {"type": "response.function_call_arguments.delta", "sequence_number": 4, **place, "delta": 'rf build"}'},
        {"type": "response.output_item.done", "sequence_number": 5, "output_index": 0, "item": complete},
        {"type": "response.completed", "sequence_number": 6, "response": {"status": "completed", "output": [complete]}},
    ]
    assert read(RESPONSES, *map(event, events)) == events
    response = {"status": "incomplete", "output": [complete]}
    events[-1] = {"type": "response.incomplete", "sequence_number": 6, "response": response}
    found = read(RESPONSES, *map(event, events))
    assert "function_call" not in json.dumps(found)
    assert [each["sequence_number"] for each in found] == list(range(2, 9))
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == CUT
    assert found[2]["delta"] == found[3]["text"] == CUT
    body = json.loads(mended_body(RESPONSES, event(response)[6:]))
    assert body["output"][0]["content"][0]["text"] == CUT
