"""Tool calls that `max_tokens`, a stop string or a failure has cut, or that do not parse: they become text.

Dynamo's parsers complete the JSON of a call that was cut, so that `rm -rf build/old` would become `rm -rf build`. From
its first call on an answer waits here for its end. Only then it is known whether its last call is complete.

They leave a call out that they cannot read. An answer that comes without text and without calls gets its whole output
as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from router.status_relay.api import CHATS, MESSAGES, RESPONSES

_Object: TypeAlias = dict[str, Any]

_MARKS = {CHATS: b'"tool_calls":[', MESSAGES: b'"type":"tool_use"', RESPONSES: b'"type":"function_call"'}
"""What an answer with a call contains. In a text the quotes would be escaped."""

_COMPLETE = frozenset(("stop", "tool_calls", "function_call", "tool_use", "end_turn"))


_TEXT_OR_CALL = re.compile(
    rb'"content":"[^"]|"(text_delta|response\.output_text\.delta|tool_use|function_call)"|"tool_calls":\['
    rb'|"type":"text","text":"[^"]|"logprobs":\[\],"text":"[^"]'
)
_LAST = re.compile(rb'"finish_reason":"|"message_delta"|"response\.(completed|incomplete)"')
"""What the events at the end of an output contain."""


def has_text_or_call(body: bytes) -> bool:
    """Whether an answer that is no stream has any output beside thoughts."""
    return _TEXT_OR_CALL.search(body) is not None


def with_text(path: str, body: bytes, text: str) -> bytes:
    """An answer that is no stream and that has come without its text."""
    answer = json.loads(body)
    with suppress(TypeError, LookupError):
        if path == CHATS:
            answer["choices"][0]["message"]["content"] = text
        elif path == RESPONSES:
            answer["output"][-1]["content"][0]["text"] = text
        else:
            thoughts = [each for each in answer["content"] if each["type"] != "text"]
            answer["content"] = [*thoughts, {"type": "text", "text": text}]
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def may_have_calls(path: str) -> bool:
    """Whether answers of a path have calls of tools."""
    return path in _MARKS


def mended_body(path: str, body: bytes, stops: Sequence[str] = ()) -> bytes:
    """An answer that is no stream.

    Args:
        stops: strings at which its text ends, see `Stops`.
    """
    if not stops and _MARKS[path] not in body:
        return body
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        answer = json.loads(body)
        if _stop_message_body(answer, stops) or _BODIES[path](answer):
            return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
    return body


class MendedStream:
    """The events of one stream.

    Args:
        path: that the client has asked.
        stops: strings at which its text ends, see `Stops`.
    """

    def __init__(self, path: str, stops: Sequence[str] = ()) -> None:
        self._path = path
        self._mark = _MARKS[path]
        self._rest = b""
        self._held: list[bytes] = []
        self._stops = Stops(stops) if stops else None
        self._has_output = False
        self._thoughts = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the client has the whole answer, though the frontend's goes on."""
        return self._stops is not None and self._stops.are_met

    @property
    def is_empty(self) -> bool:
        """Whether its output has ended without text and without a call."""
        return bool(self._held) and not self._has_output

    def passed_on(self, data: bytes) -> bytes:
        """What the client may have now."""
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        data, self._rest = data[:end], data[end:]
        if self._stops:
            data = b"".join(map(self._stops.passed_on, data.split(b"\n\n")[:-1]))
        if not self._has_output:
            self._has_output = has_text_or_call(data)
            self._thoughts += data.count(b'"content_block_start"')
        if not self._held and not self._is_held(data):
            return data
        now = []
        for event in data.split(b"\n\n")[:-1]:
            if (self._held or self._is_held(event)) and not event.startswith(b":"):
                self._held.append(event)
            else:
                now.append(event + b"\n\n")
        return b"".join(now)

    def _is_held(self, data: bytes) -> bool:
        return self._mark in data or not (self._has_output or not _LAST.search(data))

    def end(self, text: str = "") -> bytes:
        """The rest, when the frontend's stream has ended. `text`: of an output that was empty."""
        held = [raw + b"\n\n" for raw in self._held]
        read = [(raw, _data(raw)) for raw in held]
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            events = [data for _, data in read if data]
            if text:
                mended = _with_text(self._path, events, text, self._thoughts)
            else:
                mended = _STREAMS[self._path](events) if held else []
            if mended:
                held = [*map(_encoded, mended), *(raw for raw, data in read if not data)]
        return b"".join(held) + self._rest


def _data(event: bytes) -> _Object:
    """The JSON of an event; empty: it has none."""
    text = event.rpartition(b"data: ")[2]
    with suppress(ValueError, RecursionError):
        if text.startswith(b"{"):
            return dict(json.loads(text))
    return {}


def _encoded(data: _Object) -> bytes:
    """An event of chats, or one with its type."""
    head = f"event: {data['type']}\n" if "type" in data else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _with_text(path: str, events: list[_Object], text: str, index: int) -> list[_Object]:
    """The last events of a stream, with a text before them. `index`: of its block at `/v1/messages`."""
    if path == CHATS:
        events[0]["choices"][0]["delta"]["content"] = text
        return events
    if path == MESSAGES:
        begin: _Object = {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}
        delta = {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}
        return [begin, delta, {"type": "content_block_stop", "index": index}, *events]
    response, first = events[0]["response"], events[0]["sequence_number"]
    item = _text_item(response["id"], text, response["status"])
    said = [*_text_events(item, len(response["output"])), *events]
    response["output"].append(item)
    return [{**each, "sequence_number": number} for number, each in enumerate(said, start=first)]


def _as_text(name: str, arguments: str) -> str:
    """A call as the model wrote it, without what completed it."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments.rstrip().rstrip("}]").rstrip().rstrip(chr(34))}'


# -- chats


def _mend_chat_body(answer: _Object) -> bool:
    return bool(_mend_chat_stream([answer]))


def _mend_chat_stream(chunks: list[_Object]) -> list[_Object]:
    is_stopped = any((chunk.get("nvext") or {}).get("stop_reason") is not None for chunk in chunks)
    by_index: dict[int, list[_Object]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            by_index.setdefault(choice["index"], []).append(choice)
    mended = [_mend_choice(choices, is_stopped=is_stopped) for choices in by_index.values()]
    return chunks if any(mended) else []


def _mend_choice(choices: list[_Object], *, is_stopped: bool) -> bool:
    """Make text of the last call in the parts of one choice, unless it is complete."""
    last = next((each for each in choices if each.get("finish_reason")), choices[-1])
    reason = last.get("finish_reason")
    if reason in _COMPLETE and not is_stopped:
        return False
    messages = [each["message"] if "message" in each else each["delta"] for each in choices]
    calls = [
        (call.get("index", position), call)
        for message in messages
        for position, call in enumerate(message.get("tool_calls") or ())
    ]
    if not calls:
        return False
    cut = max(index for index, _ in calls)
    for message in messages:
        found = enumerate(message.pop("tool_calls", None) or ())
        if kept := [each for position, each in found if each.get("index", position) != cut]:
            message["tool_calls"] = kept
    functions = [call.get("function") or {} for index, call in calls if index == cut]
    message = last["message"] if "message" in last else last["delta"]
    text = _as_text(_joined(functions, "name"), _joined(functions, "arguments"))
    message["content"] = (message.get("content") or "") + text
    if reason in _COMPLETE and cut == min(index for index, _ in calls):
        last["finish_reason"] = "stop"
    return True


def _joined(parts: Iterable[_Object], name: str) -> str:
    return "".join(part.get(name) or "" for part in parts)


# -- /v1/messages


def _stop_message_body(answer: _Object, stops: Sequence[str]) -> bool:
    """End an answer at a stop string in its text. A call comes behind the text, whatever place it has here."""
    for index, block in enumerate(answer["content"] if stops else ()):
        if block["type"] == "text" and (met := _first(block["text"], stops)):
            block["text"] = block["text"][: met[0]]
            kept = [each for each in answer["content"][: index + 1] if each["type"] != "tool_use"]
            answer |= {"content": kept, "stop_reason": "stop_sequence", "stop_sequence": met[1]}
            return True
    return False


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string is in a text, and which."""
    return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)


class Stops:
    """Ends the text of a stream of `/v1/messages` at a stop string.

    Dynamo does not tell there that a stop string has cut a call. So it is not told of stop strings beside tools, and
    they end the text only: a call is complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._may_begin = max(map(len, stops)) - 1
        self._text = ""
        self._last: _Object = {}
        self.are_met = False

    def passed_on(self, event: bytes) -> bytes:
        """What the client may have of an event, and of those before."""
        if self.are_met:
            return b""
        if b'"type":"text_delta"' in event:
            self._last = _data(event)
            self._text += self._last["delta"]["text"]
            if met := _first(self._text, self._stops):
                self.are_met = True
                return self._taken(met[0]) + self._end(met[1])
            return self._taken(len(self._text) - self._may_begin)
        if b'"type":"content_block_stop"' in event:
            return self._taken(len(self._text)) + event + b"\n\n"
        return event + b"\n\n"

    def _taken(self, count: int) -> bytes:
        """The first characters of the text that is held."""
        text, self._text = self._text[: max(0, count)], self._text[max(0, count) :]
        return _encoded({**self._last, "delta": {"type": "text_delta", "text": text}}) if text else b""

    def _end(self, stop: str) -> bytes:
        delta = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        ends: list[_Object] = [
            {"type": "content_block_stop", "index": self._last["index"]},
            {"type": "message_delta", "delta": delta, "usage": self._last.get("usage") or {}},
            {"type": "message_stop"},
        ]
        return b"".join(map(_encoded, ends))


def _mend_message_body(answer: _Object) -> bool:
    blocks = answer["content"]
    uses = [index for index, block in enumerate(blocks) if block["type"] == "tool_use"]
    if not uses or answer.get("stop_reason") in _COMPLETE:
        return False
    cut = blocks.pop(uses[-1])
    blocks.append({"type": "text", "text": _as_text(cut["name"], json.dumps(cut["input"], ensure_ascii=False))})
    return True


def _mend_message_stream(events: list[_Object]) -> list[_Object]:
    reasons = [(each.get("delta") or {}).get("stop_reason") for each in events if each["type"] == "message_delta"]
    uses = [each for each in events if (each.get("content_block") or {}).get("type") == "tool_use"]
    if not uses or (reasons and reasons[-1] in _COMPLETE):
        return []
    cut = uses[-1]
    own = [each for each in events if each["type"] == "content_block_delta" and each["index"] == cut["index"]]
    text = _as_text(cut["content_block"]["name"], _joined((each["delta"] for each in own), "partial_json"))
    cut["content_block"] = {"type": "text", "text": "" if own else text}
    for number, each in enumerate(own):
        each["delta"] = {"type": "text_delta", "text": "" if number else text}
    return events


# -- /v1/responses


def _mend_response_body(answer: _Object) -> bool:
    if answer.get("status") == "completed":
        return False
    calls = [index for index, item in enumerate(answer["output"]) if item["type"] == "function_call"]
    if calls:
        cut = answer["output"].pop(calls[-1])
        answer["output"].append(_text_item(cut["id"], _as_text(cut["name"], cut["arguments"]), "incomplete"))
    return bool(calls)


def _text_item(id_: str, text: str, status: str) -> _Object:
    """A message with a text."""
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    return {"type": "message", "content": [part], "id": f"msg_{id_}", "role": "assistant", "status": status}


def _mend_response_stream(events: list[_Object]) -> list[_Object]:
    calls = [each for each in events if each["type"] == "response.output_item.added" and "arguments" in each["item"]]
    if not calls or any(each["type"] == "response.completed" for each in events):
        return []
    place, first = calls[-1]["output_index"], events[0]["sequence_number"]
    deltas = (each for each in events if each.get("output_index") == place and each["type"].endswith("arguments.delta"))
    call = calls[-1]["item"]
    item = _text_item(call["id"], _as_text(call["name"], _joined(deltas, "delta")), "incomplete")
    mended: list[_Object] = []
    for each in events:
        if each is calls[-1]:
            mended += _text_events(item, place)
        elif each.get("output_index") != place:
            mended.append(each)
        if each["type"] == "response.incomplete":
            each["response"]["output"][place] = item
    return [{**each, "sequence_number": number} for number, each in enumerate(mended, start=first)]


def _text_events(item: _Object, output_index: int) -> list[_Object]:
    part = item["content"][0]
    place = {"item_id": item["id"], "output_index": output_index, "content_index": 0}
    opened = {**item, "content": [], "status": "in_progress"}
    return [
        {"type": "response.output_item.added", "output_index": output_index, "item": opened},
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
        {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": output_index, "item": item},
    ]


_BODIES: dict[str, Callable[[_Object], bool]] = {
    CHATS: _mend_chat_body,
    MESSAGES: _mend_message_body,
    RESPONSES: _mend_response_body,
}
_STREAMS: dict[str, Callable[[list[_Object]], list[_Object]]] = {
    CHATS: _mend_chat_stream,
    MESSAGES: _mend_message_stream,
    RESPONSES: _mend_response_stream,
}
"""They return all events again; none: nothing is to be mended."""
