"""Requests that Dynamo's frontend refuses for ever, mended where they can be read in one safe way.

An agent sends its whole history in each round. If the frontend refuses one message of it, the session is lost. So a
request that was refused is read here, and sent again if something was mended. What cannot be mended is refused with a
reason that names the message. Of the requests that are served only those are read that have items which Dynamo loses.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from router.status_relay.api import CHATS, MESSAGES, RESPONSES

_Object: TypeAlias = dict[str, Any]

_UNSUPPORTED = re.compile(r"Unsupported parameter\(s\): (.*)")

_REFUSED_BY_THE_TEMPLATE = "Invalid request"
"""The frontend's whole reason."""

_RENAMED = {"regex": "guided_regex", "json_schema": "guided_json", "ebnf": "guided_grammar"}
"""Names of SGLang -> those of Dynamo."""

_STRUCTURED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
"""Members of vLLM's `structured_outputs` -> names of Dynamo."""

_CHANGES_THE_ANSWER = frozenset(
    (
        "bad_words", "best_of", "chat_template", "custom_logit_processor", "documents", "echo", "format",
        "logits_processors", "lora", "lora_path", "lora_request", "options", "stop_regex", "structural_tag",
        "structured_outputs", "suffix", "thinking_budget", "truncate_prompt_tokens",
    )
)  # fmt: skip
"""Parameters without which a client would get another answer than it has asked for."""

_ROLES = {"human": "user", "ai": "assistant", "model": "assistant"}

_TEXTS = frozenset(("text", "input_text", "output_text", "summary_text", "reasoning_text"))
_THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
_CALLS = frozenset(("tool_use", "tool_call", "tool-call"))
_RESULTS = frozenset(("tool_result", "tool-result"))
_MEDIA = frozenset(("image", "image_url", "input_image", "input_audio", "audio_url", "video_url"))


class CannotMendError(Exception):
    """What is wrong with a request, and where."""


def mended_request(path: str, body: bytes, reason: str) -> bytes | None:
    """The request as the frontend can take it; None: nothing was found to mend.

    Args:
        body: of the request.
        reason: why the frontend has refused it.

    Raises:
        CannotMendError: a part of it cannot be read in one safe way.
    """
    original, is_clean = _read(body)
    if not isinstance(original, dict):
        return None
    if "text only" in reason and (place := _media_place(original)):
        raise CannotMendError(f"{place}: this model is served for text only; leave the part out")
    request = dict(original)
    _mend_parameters(path, request, reason)
    if path == RESPONSES:
        _mend_items(request)
    elif isinstance(messages := request.get("messages"), list):
        mend = _message if path == MESSAGES else _chat_message
        request["messages"] = [
            each for index, message in enumerate(messages) for each in mend(message, f"messages[{index}]")
        ]
        if path == CHATS:
            _name_calls(request["messages"])
    text = json.dumps(request, ensure_ascii=False)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # without halves of characters
    is_same = is_clean and whole == json.dumps(original, ensure_ascii=False)
    if is_same and reason == _REFUSED_BY_THE_TEMPLATE:
        raise CannotMendError("the model's chat template does not take messages of these roles in this order")
    return None if is_same else whole.encode()


def with_known_model(body: bytes, aliases: Sequence[tuple[str, str]]) -> bytes:
    """A request for the model that its model's name stands for.

    Args:
        aliases: pairs of a pattern and a name; the first that matches counts.
    """
    if aliases and any(_known_model(found, aliases) for found in map(bytes.decode, _MODEL.findall(body))):
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            request = json.loads(body)
            if name := _known_model(request["model"], aliases):
                return json.dumps({**request, "model": name}).encode()
    return body


_MODEL = re.compile(rb'"model"\s*:\s*"([ -~]*?)"')


def _known_model(name: str, aliases: Sequence[tuple[str, str]]) -> str | None:
    return next((known for pattern, known in aliases if name != known and fnmatchcase(name, pattern)), None)


_LOST_ITEMS = re.compile(rb'"type"\s*:\s*"((custom_tool|(local_)?shell|apply_patch)_call|item_reference|compaction)')
"""Items that the frontend takes and leaves out, so that the model would not see what its tools have done."""


def loses_items(path: str, body: bytes) -> bool:
    """Whether a request must be mended before the frontend gets it."""
    return path == RESPONSES and _LOST_ITEMS.search(body) is not None


def stops_made_visible(path: str, body: bytes) -> tuple[bytes, tuple[str, ...]]:
    """A request with tools and stop strings, so that a stop string within a call can be noticed.

    Returns:
        A chat whose answer tells which stop string has ended it; or a message without its stop strings, and these.
    """
    name = _STOPS.get(path)
    if name and f'"{name}"'.encode() in body and b'"tools"' in body:
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            request = json.loads(body)
            stops = request.get(name)
            if not stops or not request.get("tools"):
                return body, ()
            if path == MESSAGES:
                del request[name]
                return json.dumps(request).encode(), tuple(each for each in map(str, stops) if each)
            nvext = request.get("nvext") or {}
            fields = {"extra_fields": [*(nvext.get("extra_fields") or ()), "stop_reason"]}
            return json.dumps({**request, "nvext": {**nvext, **fields}}).encode(), ()
    return body, ()


_STOPS = {CHATS: "stop", MESSAGES: "stop_sequences"}


def _media_place(request: _Object) -> str | None:
    """Where the first part is that is no text."""
    for name in ("messages", "input"):
        for index, message in enumerate(request.get(name) or ()):
            for key in ("content", "output"):
                parts = message.get(key) if isinstance(message, dict) else None
                for number, part in enumerate(parts if isinstance(parts, list) else ()):
                    if _has_media([part]) or (isinstance(part, dict) and _has_media(part.get("content"))):
                        return f"{name}[{index}].{key}[{number}]"
    return None


def _read(body: bytes) -> tuple[Any, bool]:
    """The JSON of a body, and whether it is written as JSON must be."""
    with suppress(ValueError, RecursionError):
        return json.loads(body), True
    with suppress(ValueError, RecursionError):
        return json.loads(body.decode(errors="replace"), strict=False), False
    return None, False


# -- parameters


def _mend_parameters(path: str, request: _Object, reason: str) -> None:
    for name in [name for name, value in request.items() if value is None and name not in ("messages", "input")]:
        del request[name]
    for name, value in request.items():
        if isinstance(value, float) and name.startswith("max_") and value.is_integer():
            request[name] = int(value)
    for name in ("stop", "stop_sequences", "tools"):
        if request.get(name) in ([], ""):
            del request[name]
    if not request.get("tools") and request.get("tool_choice") in ("auto", "none"):
        del request["tool_choice"]
    if not request.get("stream"):
        request.pop("stream_options", None)
    if path == RESPONSES:
        request.pop("max_tool_calls", None)  # it counts calls of tools that Dynamo does not have
    _mend_tools(path, request)
    if found := _UNSUPPORTED.search(reason):
        _mend_unsupported(request, re.findall(r"`([^`]+)`", found[1]))


def _mend_unsupported(request: _Object, names: list[str]) -> None:
    values = {name: request.pop(name) for name in names if name in request}
    for name, value in values.items():
        if name in ("enable_thinking", "think") and isinstance(value, bool):
            _think(request, value)
        elif name == "reasoning" and isinstance(value, dict):
            if isinstance(effort := value.get("effort"), str):
                request.setdefault("reasoning_effort", effort)
            if isinstance(value.get("enabled"), bool):
                _think(request, value["enabled"])
        elif name in _RENAMED:
            request.setdefault(_RENAMED[name], value)
        elif name == "structured_outputs" and isinstance(value, dict) and value.keys() <= _STRUCTURED.keys():
            request.update({_STRUCTURED[key]: each for key, each in value.items() if each is not None})
        elif name in _CHANGES_THE_ANSWER and value not in (False, [], {}, ""):
            raise CannotMendError(f"the parameter {name} is not supported, and the answer depends on it; leave it out")


def _think(request: _Object, is_on: bool) -> None:
    options = request.get("chat_template_kwargs")
    request["chat_template_kwargs"] = {"enable_thinking": is_on, **(options if isinstance(options, dict) else {})}


_CHOICES = {"auto": "auto", "any": "required", "required": "required", "none": "none"}


def _mend_tools(path: str, request: _Object) -> None:
    """Tools in the form of another API. Tools of a provider are left out beside those of the client."""
    tools = request.get("tools")
    if isinstance(tools, list) and all(isinstance(each, dict) for each in tools):
        own = [each for each in map(_TOOL_FORMS.get(path, _chat_tool), tools) if each is not None]
        if own:
            request["tools"] = own
    if path == MESSAGES:
        return
    match request.get("tool_choice"):
        case "any":
            request["tool_choice"] = "required"
        case {"type": "tool", "name": str(name)} if path != RESPONSES:
            request["tool_choice"] = {"type": "function", "function": {"name": name}}
        case {"type": str(kind), **rest} if kind in _CHOICES and not rest.keys() - {"disable_parallel_tool_use"}:
            request["tool_choice"] = _CHOICES[kind]


def _chat_tool(tool: _Object) -> _Object | None:
    match tool:
        case {"function": dict()}:
            return tool if tool.get("type") == "function" else {**tool, "type": "function"}
        case {"name": str(), "input_schema": dict(schema)} | {"type": "function", "name": str(), "parameters": schema}:
            function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
            return {"type": "function", "function": {key: each for key, each in function.items() if each is not None}}
    return None


def _messages_tool(tool: _Object) -> _Object | None:
    return tool if tool.get("type", "custom") == "custom" else None


def _responses_tool(tool: _Object) -> _Object | None:
    if tool.get("type") != "function":
        return tool if tool.get("type") == "namespace" else None
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, dict) and "name" not in tool else tool


_TOOL_FORMS = {MESSAGES: _messages_tool, RESPONSES: _responses_tool}


# -- parts of all APIs


def _arguments(value: Any) -> str:
    """The arguments of a call as JSON of an object. What is no object is kept whole as one argument."""
    if isinstance(value, str):
        if _is_object(value):
            return value
        with suppress(ValueError, RecursionError):
            value = json.loads(value, strict=False)
        if isinstance(value, str):  # encoded twice
            with suppress(ValueError, RecursionError):
                twice = json.loads(value, strict=False)
                value = twice if isinstance(twice, dict) else value
    arguments = value if isinstance(value, dict) else {} if value in (None, "") else {"arguments": value}
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps({"arguments": json.dumps(arguments)})


def _is_object(text: str) -> bool:
    """Whether the frontend takes it for an object of JSON."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_constant=_no_number)
        return isinstance(value, dict) and _is_whole(json.dumps(value, ensure_ascii=False))
    return False


def _is_whole(text: str) -> bool:
    """Whether there is no half of a character."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _no_number(name: str) -> None:
    raise ValueError(name)


def _as_text(value: Any) -> str:
    """The result of a tool in any form."""
    if value is None:
        return ""
    if isinstance(value, list) and all(_text_of(each) is not None for each in value):
        return "\n".join(str(_text_of(each)) for each in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text_of(part: Any) -> str | None:
    """The text of a part of a message; None: it has none, or not only text."""
    match part:
        case str():
            return part
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
            return text
        case {"type": str(kind), "text": None} if kind in _TEXTS:
            return ""
        case {"text": str(text), **rest} if "type" not in rest:
            return text
        case {"type": "tool_reference", "tool_name": str(name)}:
            return f"tool: {name}"
        case {"type": "search_result", "content": list(parts)} | {
            "type": "document",
            "source": {"type": "content", "content": list(parts)},
        } if all(_text_of(each) is not None for each in parts):
            return "\n".join((*_titles(part), *(str(_text_of(each)) for each in parts)))
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return "\n".join((*_titles(part), text))
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return "\n".join((*_titles(part), text))
        case {"type": "file", "file": {"file_data": str(data)}}:
            return _file_text(data, part["file"])
        case {"type": "input_file", "file_data": str(data)}:
            return _file_text(data, part)
    return None


def _titles(part: Mapping[str, Any]) -> Iterator[str]:
    return (value for name in ("title", "source") if isinstance(value := part.get(name), str))


def _file_text(data: str, file: Mapping[str, Any]) -> str | None:
    head, comma, encoded = data.partition(",")
    if comma and head.startswith("data:text/") and head.endswith(";base64"):
        with suppress(binascii.Error, ValueError):
            text = base64.b64decode(encoded, validate=True).decode()
            name = file.get("filename")
            return f"{name}\n{text}" if isinstance(name, str) else text
    return None


def _thought(part: Mapping[str, Any]) -> str:
    found = (part.get(name) for name in ("thinking", "text", "reasoning"))
    return next((text for text in found if isinstance(text, str)), "")


def _unknown(part: Any, place: str) -> CannotMendError:
    kind = part.get("type") if isinstance(part, dict) else None
    return CannotMendError(f"{place}: a part of the type {kind!r} is not supported; leave it out")


# -- messages of chats


def _chat_message(message: Any, place: str) -> list[_Object]:
    """One message as one or, where it has the results of tools as parts, as several."""
    if not isinstance(message, dict):
        raise CannotMendError(f"{place}: a message must be an object")
    message = {**message, "role": _role(message.get("role"))}
    if message.get("audio") == {}:
        del message["audio"]
    if "reasoning" in message and "reasoning_content" in message:
        del message["reasoning"]
    content = message.get("content")
    before: list[_Object] = []
    if message["role"] in ("tool", "function"):
        if not _has_media(content):
            message["content"] = _as_text(content) if not isinstance(content, str) else content
    elif isinstance(content, list):
        before = _mend_parts(message, content, place)
    elif isinstance(content, dict):
        before = _mend_parts(message, [content], place)
    elif content is None and message["role"] != "assistant":
        message["content"] = ""
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_chat_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return [*before, message] if message.get("content") != [] or not before else before


def _role(role: Any) -> Any:
    name = role.lower() if isinstance(role, str) else role
    return _ROLES.get(name, name) if isinstance(name, str) else name


def _has_media(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(each, dict) and each.get("type") in _MEDIA for each in content)


def _mend_parts(message: _Object, parts: list[Any], place: str) -> list[_Object]:
    """Mend the parts of a message. Returns the results of tools among them, as messages."""
    kept: list[Any] = []
    thoughts: list[str] = []
    results: list[_Object] = []
    calls = list(message.get("tool_calls") or ())
    known = {call.get("id") for call in calls if isinstance(call, dict)}
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if (text := _text_of(part)) is not None:
            kept.append({"type": "text", "text": text})
        elif kind in _THOUGHTS and message["role"] == "assistant":
            thoughts.append(_thought(part))
        elif kind in _CALLS and message["role"] == "assistant":
            if _call_id(part) not in known or _call_id(part) is None:
                calls.append(part)
        elif kind in _RESULTS:
            results.append({"role": "tool", "tool_call_id": _call_id(part), "content": _as_text(_result(part))})
        elif kind in _MEDIA:
            kept.append(_media(part))
        else:
            raise _unknown(part, f"{place}.content[{index}]")
    message["content"] = kept if kept or message["role"] != "assistant" else None if calls else ""
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message.setdefault("reasoning_content", "\n".join(filter(None, thoughts)))
    return results


def _media(part: _Object) -> _Object:
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    return part


def _call_id(part: Mapping[str, Any]) -> str | None:
    found = (part.get(name) for name in ("id", "tool_use_id", "tool_call_id", "toolCallId", "call_id"))
    return next((each for each in found if isinstance(each, str)), None)


def _result(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in ("content", "output", "result") if name in part), None)


def _chat_call(call: Any, place: str) -> _Object:
    """A call in the form of chats, whichever form it has."""
    match call:
        case {
            "id": str(),
            "type": "function",
            "function": {"name": str(), "arguments": dict() | str() as arguments},
        } if isinstance(arguments, dict) or _is_object(arguments):
            return dict(call)
        case dict():
            pass
        case _:
            raise CannotMendError(f"{place}: a call must be an object")
    inner = next((call[name] for name in ("function", "custom") if isinstance(call.get(name), dict)), call)
    name = next((inner[key] for key in ("name", "toolName", "tool_name") if isinstance(inner.get(key), str)), None)
    if name is None:
        raise CannotMendError(f"{place}: the call names no function")
    value = next((inner[key] for key in ("arguments", "args", "input") if key in inner), None)
    if inner is call.get("custom"):
        value = {"input": value}
    return {
        "id": _call_id(call),
        "type": "function",
        "function": {"name": name, "arguments": _arguments(value)},
    }


def _name_calls(messages: Any) -> None:
    """Calls and results without an id get one, in the order in which they came."""
    waiting: list[str] = []
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if message.get("role") == "assistant":
            for number, call in enumerate(message.get("tool_calls") or ()):
                call["id"] = call["id"] or f"call_{index}_{number}"
                waiting.append(call["id"])
        elif message.get("role") == "tool":
            if not isinstance(message.get("tool_call_id"), str):
                message["tool_call_id"] = waiting[0] if waiting else "unknown"
            if message["tool_call_id"] in waiting:
                waiting.remove(message["tool_call_id"])


# -- messages of Anthropic's API


def _message(message: Any, place: str) -> list[_Object]:
    if not isinstance(message, dict):
        raise CannotMendError(f"{place}: a message must be an object")
    role = _role(message.get("role"))
    message = {**message, "role": "system" if role == "developer" else role}
    content = message.get("content")
    if not content:
        message["content"] = ""
    elif isinstance(content, list):
        message["content"] = [_block(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    return [message]


def _block(part: Any, place: str) -> Any:
    match part:
        case {"type": "text", "text": str()}:
            return part
        case {"type": "thinking"}:
            return {"signature": "", **part}
        case {"type": "tool_use" | "server_tool_use"}:
            return {**part, "input": json.loads(_arguments(part.get("input")))}
        case {"type": "tool_result", "content": list(parts)}:
            return {**part, "content": [_result_block(each, f"{place}.content") for each in parts]}
        case _ if (text := _text_of(part)) is not None:
            return {"type": "text", "text": text}
        case {"type": "document" | "container_upload" | "search_result"}:
            raise _unknown(part, place)
    return part


def _result_block(part: Any, place: str) -> Any:
    if (text := _text_of(part)) is not None:
        return {"type": "text", "text": text}
    if isinstance(part, dict) and part.get("type") == "image":
        return part
    raise _unknown(part, place)


# -- items of /v1/responses


def _mend_items(request: _Object) -> None:
    items = request.get("input")
    if isinstance(items, list):
        mends = (_item(item, f"input[{index}]") for index, item in enumerate(items))
        request["input"] = [each for each in mends if each is not None]


def _item(item: Any, place: str) -> _Object | None:
    """An item in a form that the frontend takes; None: it carries nothing for the model."""
    if not isinstance(item, dict):
        raise CannotMendError(f"{place}: an item must be an object")
    kind = item.get("type") or "message"
    if kind in _READ_BY_DYNAMO:
        return item
    if kind not in _ITEMS:
        raise CannotMendError(f"{place}: an item of the type {kind!r} cannot be read here; leave it out")
    return _ITEMS[kind](item, place)


def _message_item(item: _Object, place: str) -> _Object:
    role = _role(item.get("role"))
    if role == "tool":
        return {
            "type": "function_call_output",
            "call_id": _call_id(item) or "",
            "output": _as_text(item.get("content")),
        }
    item = {**item, "role": role}
    content = item.get("content")
    if content is None:
        item["content"] = ""
    elif isinstance(content, list) and role == "assistant":
        item["content"] = "".join(_item_part(each, f"{place}.content[{at}]")["text"] for at, each in enumerate(content))
    elif isinstance(content, list):
        item["content"] = [_item_part(each, f"{place}.content[{at}]") for at, each in enumerate(content)]
    return item


def _item_part(part: Any, place: str) -> _Object:
    if (text := _text_of(part)) is not None:
        return {"type": "input_text", "text": text}
    if _has_media([part]):
        return dict(part)
    raise _unknown(part, place)


def _call_item(item: _Object, _place: str) -> _Object:
    return {**item, "arguments": _arguments(item.get("arguments"))}


def _output_item(item: _Object, _place: str) -> _Object:
    output = item.get("output")
    if isinstance(output, str) or _has_media(output):
        return item
    return {**item, "output": _as_text(output)}


def _other_call(name: str | None, field: str) -> Callable[[_Object, str], _Object]:
    def call(item: _Object, _place: str) -> _Object:
        value = item.get(field)
        return {
            "type": "function_call",
            "call_id": _call_id({"id": item.get("call_id") or item.get("id")}) or "",
            "name": name or item.get("name") or "",
            "arguments": _arguments(value if isinstance(value, dict) else {field: value}),
        }

    return call


def _other_output(item: _Object, _place: str) -> _Object:
    call_id = item.get("call_id") or item.get("id") or ""
    return {"type": "function_call_output", "call_id": call_id, "output": _as_text(item.get("output"))}


def _nothing(_item: _Object, _place: str) -> None:
    """It is for the client only."""


_READ_BY_DYNAMO = frozenset(
    (
        "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call", "image_generation_call",
        "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "reasoning", "tool_search_call",
        "tool_search_output",
    )
)  # fmt: skip

_ITEMS: Mapping[str, Callable[[_Object, str], _Object | None]] = {
    "message": _message_item,
    "function_call": _call_item,
    "function_call_output": _output_item,
    "custom_tool_call": _other_call(None, "input"),
    "custom_tool_call_output": _other_output,
    "local_shell_call": _other_call("local_shell", "action"),
    "local_shell_call_output": _other_output,
    "shell_call": _other_call("shell", "action"),
    "shell_call_output": _other_output,
    "apply_patch_call": _other_call("apply_patch", "operation"),
    "apply_patch_call_output": _other_output,
    "web_search_call": _nothing,
    "ghost_snapshot": _nothing,
}
