"""Requests that Dynamo's frontend refuses for ever, mended where they can be read in one safe way.

An agent sends its whole history in each round. If the frontend refuses one message of it, the session is lost. So a
request that was refused is read here, and sent again if something was mended. What cannot be mended is refused with a
reason that names the message. Of the requests that are served only those are read that have parts which Dynamo loses.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

_HISTORIES = {CHATS: "messages", MESSAGES: "messages", RESPONSES: "input"}


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
    request = dict(original)
    _mend_parameters(path, request, reason)
    name = _HISTORIES.get(path, "")
    if isinstance(entries := request.get(name), list):
        request[name] = _mended_history(path, name, entries)
    text = json.dumps(request, ensure_ascii=False)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # without halves of characters
    is_same = is_clean and whole == text and json.dumps(request, sort_keys=True) == json.dumps(original, sort_keys=True)
    if is_same and reason == _REFUSED_BY_THE_TEMPLATE:
        raise CannotMendError("the model's chat template does not take messages of these roles in this order")
    return None if is_same else whole.encode()


def with_known_model(body: bytes, aliases: Sequence[tuple[str, str]]) -> bytes:
    """A request for the model that its model's name stands for.

    Args:
        aliases: pairs of a pattern and a name; the first that matches counts.
    """
    if aliases and any(_known_model(found, aliases) for found in map(bytes.decode, MODEL_NAME.findall(body))):
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            request = json.loads(body)
            if name := _known_model(request["model"], aliases):
                return json.dumps({**request, "model": name}).encode()
    return body


MODEL_NAME = re.compile(rb'"model"\s*:\s*"([ -~]*?)"')


def _known_model(name: str, aliases: Sequence[tuple[str, str]]) -> str | None:
    return next((known for pattern, known in aliases if name != known and fnmatchcase(name, pattern)), None)


_LOST = {
    CHATS: re.compile(rb'"type"\s*:\s*"input_audio"|"function_call"\s*:\s*\{'),
    RESPONSES: re.compile(
        rb'"type"\s*:\s*"(?!function_|web_search_|image_)(\w+_call(_output)?|item_reference|compaction)'
    ),
}
"""What the frontend takes and leaves out, so that the model would not see what its user or its tools have told."""


def loses_parts(path: str, body: bytes) -> bool:
    """Whether a request must be mended before the frontend gets it."""
    return path in _LOST and _LOST[path].search(body) is not None


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


def _read(body: bytes) -> tuple[Any, bool]:
    """The JSON of a body, and whether it is written as JSON must be."""
    with suppress(ValueError, RecursionError):
        return json.loads(body), True
    with suppress(ValueError, RecursionError):
        return json.loads(body.decode(errors="replace"), strict=False), False
    return None, False


# -- parameters


def _mend_parameters(path: str, request: _Object, reason: str) -> None:
    for name in [name for name, value in request.items() if value is None and name not in _HISTORIES.values()]:
        del request[name]
    for name, value in request.items():
        if isinstance(value, float) and name.startswith(_COUNTS) and value.is_integer():
            request[name] = int(value)
    for name in ("stop", "stop_sequences", "tools"):
        if isinstance(value := request.get(name), list | str) and not (kept := [each for each in value if each != ""]):
            del request[name]
        elif isinstance(value, list):
            request[name] = kept
    if not request.get("tools") and request.get("tool_choice") in ("auto", "none"):
        del request["tool_choice"]
    if not request.get("stream"):
        request.pop("stream_options", None)
    if path == RESPONSES:
        request.pop("max_tool_calls", None)  # it counts calls of tools that Dynamo does not have
    _mend_tools(path, request)
    if found := _UNSUPPORTED.search(reason):
        _mend_unsupported(request, re.findall(r"`([^`]+)`", found[1]))


_COUNTS = ("max_", "min_tokens", "seed", "top_k")


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
        elif name == "best_of" and value in (1, request.get("n")):
            continue
        elif name in _CHANGES_THE_ANSWER and value not in (False, [], {}, ""):
            raise CannotMendError(f"the parameter {name} is not supported, and the answer depends on it; leave it out")


def _think(request: _Object, is_on: bool) -> None:
    options = request.get("chat_template_kwargs")
    request["chat_template_kwargs"] = {"enable_thinking": is_on, **(options if isinstance(options, dict) else {})}


def _mend_tools(path: str, request: _Object) -> None:
    """Tools in the form of another API. Tools of a provider are left out beside those of the client."""
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if request.pop(name, None):
            raise CannotMendError(f"the parameter {name} is not supported; send {instead} in its place")
    tools = request.get("tools")
    if isinstance(tools, list) and all(isinstance(each, dict) for each in tools):
        own = [each for each in (_tool(path, tool) for tool in tools) if each is not None]
        if tools and not own:
            raise CannotMendError("tools[0]: only functions, with a name, can be called here; leave the tool out")
        request["tools"] = own
    choice = request.get("tool_choice")
    match choice:
        case "auto" | "any" | "required" | "none":
            mode = choice
        case {"type": "auto" | "any" | "required" | "none" as mode, **rest} if path != MESSAGES and not (
            rest.keys() - {"disable_parallel_tool_use"}
        ):
            pass
        case {"type": "tool" | "function", "name": str(name)} | {"function": {"name": str(name)}}:
            form = "tool" if path == MESSAGES else "function"
            request["tool_choice"] = {
                "type": form,
                **({"function": {"name": name}} if path == CHATS else {"name": name}),
            }
            return
        case _:
            return
    if path == MESSAGES:
        request["tool_choice"] = {"type": "any" if mode == "required" else mode}
    else:
        request["tool_choice"] = "required" if mode == "any" else mode


def _tool(path: str, tool: _Object) -> _Object | None:
    """A function in the form of a path; None: it is a tool of a provider."""
    if path == RESPONSES and tool.get("type") == "namespace":
        return tool
    inner = tool["function"] if isinstance(tool.get("function"), dict) else tool
    schema = next((inner[key] for key in ("parameters", "input_schema") if isinstance(inner.get(key), dict)), None)
    kind = tool.get("type", "function")
    if not isinstance(inner.get("name"), str) or not (kind == "function" or (kind == "custom" and schema is not None)):
        return None
    if path == MESSAGES:
        known = {key: inner[key] for key in ("name", "description") if key in inner}
        return tool if "input_schema" in tool else {**known, "input_schema": schema or {"type": "object"}}
    function = {key: each for key, each in inner.items() if key not in ("type", "input_schema")}
    function |= {} if schema is None else {"parameters": schema}
    if path == RESPONSES:
        return {"type": "function", **function}
    return {**tool, "type": "function"} if inner is not tool else {"type": "function", "function": function}


# -- histories
#
# Each message or item is read into parts, whichever API they are of, and written for the API that is asked. A part is
# an object of the type `text`, `thought`, `call` or `result`.


@dataclass(slots=True)
class _Entry:
    """A message, or an item that is none.

    Attributes:
        source: what the client has sent.
        role: whose it is; "": it is an item.
    """

    source: _Object
    role: str
    parts: list[_Object]

    def of(self, kind: str) -> list[_Object]:
        return [part for part in self.parts if part["type"] == kind]


_ROLES = {"human": "user", "ai": "assistant", "model": "assistant"}
_SPEAKERS = frozenset(("system", "developer", "user", "assistant"))
_ITEMS_FOR_CLIENTS = frozenset(("ghost_snapshot", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"))
_TEXTS = frozenset(("text", "input_text", "output_text", "summary_text", "reasoning_text"))
_THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
_MEDIA = re.compile(r"(input_|computer_)?(image|audio|video|screenshot)(_url|_file)?")


def _mended_history(path: str, name: str, entries: list[Any]) -> list[Any]:
    read = [_entry(entry, f"{name}[{index}]") for index, entry in enumerate(entries)]
    _name_calls(read)
    return [each for entry in read for each in _WRITERS[path](entry)]


def _entry(source: Any, place: str) -> _Entry:
    if not isinstance(source, dict):
        raise CannotMendError(f"{place}: a message must be an object")
    kind = source.get("role") or source.get("type")
    role = _ROLES.get(kind.lower(), kind.lower()) if isinstance(kind, str) else ""
    if role in ("tool", "function"):
        return _Entry(source, "tool", [_result(source, place)])
    if role in _SPEAKERS:
        entry = _Entry(source, role, _parts(source, place))
        if role != "assistant" and (entry.of("call") or entry.of("thought")):
            raise CannotMendError(f"{place}: only messages of the assistant may have calls and thoughts")
        return entry
    if "role" in source or role in ("", "message"):
        raise CannotMendError(f"{place}: the role {kind!r} is not known")
    return _Entry(source, "", _item_parts(source, place))


def _parts(message: _Object, place: str) -> list[_Object]:
    content, calls = message.get("content"), message.get("tool_calls")
    found = content if isinstance(content, list) else [] if content in (None, "") else [content]
    parts = [_part(part, f"{place}.content[{at}]") for at, part in enumerate(found)]
    calls = [*(calls if isinstance(calls, list) else ()), *filter(None, (message.get("function_call"),))]
    told = [_call(call, f"{place}.tool_calls[{at}]") for at, call in enumerate(calls)]
    known = {call["id"] for call in told if call["id"]}
    return [part for part in parts if part["type"] != "call" or part["id"] not in known] + told


def _item_parts(item: _Object, place: str) -> list[_Object]:
    """The parts of an item. A call that its provider has run has its result too, or nothing for the model."""
    kind = item["type"]
    if kind in _ITEMS_FOR_CLIENTS:
        return []
    part = _part(item, place)
    if part["type"] != "call" or kind == "function_call" or "call_id" in item:
        return [part]
    return [part, _result(item, place)] if any(item.get(key) for key in _OUTCOMES) else []


def _part(part: Any, place: str) -> _Object:
    if (text := _text_of(part)) is not None:
        return part if _is_text(part) else {"type": "text", "text": text}
    kind = str(part.get("type")).replace("-", "_")
    if kind in _THOUGHTS:
        text = _as_text(_first_of(part, "thinking", "text", "reasoning", "summary"), place)
        return {"type": "thought", "text": text, "signature": part.get("signature") or ""}
    if kind.endswith(("_call", "_use")):
        return _call(part, place)
    if kind.endswith(("_result", "_output")):
        return _result(part, place)
    raise CannotMendError(f"{place}: {_fault(part)}; leave it out")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _fault(part: _Object) -> str:
    kind = part.get("type")
    if isinstance(kind, str) and _MEDIA.fullmatch(kind):
        return f"this model is served for text only, and the part is of the type {kind!r}"
    return f"a part of the type {kind!r} cannot be read here"


def _text_of(part: Any) -> str | None:
    """The text of a part; None: it has none, or not only text."""
    match part:
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind), "text": str() | None as text} if kind in _TEXTS:
            return text or ""
        case {"text": str(text), **rest} if "type" not in rest:
            return text
        case {"type": "tool_reference", "tool_name": str(name)}:
            return f"tool: {name}"
        case {"type": "web_search_result", "title": str(title), "url": str(url)}:
            return f"{title}\n{url}"
        case (
            {"type": "document", "source": {"type": "text", "data": inner}}
            | {"type": "document", "source": {"type": "content", "content": inner}}
            | {"type": "search_result", "content": inner}
        ):
            texts = [_text_of(each) for each in (inner if isinstance(inner, list) else [inner])]
            titles = [value for name in ("title", "source") if isinstance(value := part.get(name), str)]
            return None if None in texts else "\n".join((*titles, *map(str, texts)))
        case {"type": "file", "file": {"file_data": str(data), **file}}:
            return _file_text(data, file)
        case {"type": "input_file", "file_data": str(data)}:
            return _file_text(data, part)
        case dict():
            return None
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)


def _file_text(data: str, file: Mapping[Any, Any]) -> str | None:
    head, comma, encoded = data.partition(",")
    if comma and head.startswith("data:text/") and head.endswith(";base64"):
        with suppress(binascii.Error, ValueError):
            text = base64.b64decode(encoded, validate=True).decode()
            name = file.get("filename")
            return f"{name}\n{text}" if isinstance(name, str) else text
    return None


def _as_text(value: Any, place: str) -> str:
    """The text of a result or of thoughts, in whichever form they are."""
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and _MEDIA.fullmatch(kind):
            raise CannotMendError(f"{place}: {_fault(part)}; leave it out")
    texts = [_text_of(part) for part in parts if part is not None]
    is_data = None in texts or (isinstance(value, list) and not all(isinstance(part, dict | str) for part in value))
    return json.dumps(value, ensure_ascii=False) if is_data else "\n".join(map(str, texts))


_OUTCOMES = ("output", "outputs", "results")


def _result(part: _Object, place: str) -> _Object:
    names = ("call_id", "tool_use_id", "tool_call_id", "toolCallId", *(() if "role" in part else ("id",)))
    value = _first_of(part, "content", "result", *_OUTCOMES, "tools")
    texts = value if isinstance(value, list) and all(map(_is_text, value)) else None
    return {"type": "result", "id": _string(part, *names), "text": _as_text(value, place), "texts": texts}


def _call(call: Any, place: str) -> _Object:
    if not isinstance(call, dict):
        raise CannotMendError(f"{place}: a call must be an object")
    inner = next((call[name] for name in ("function", "custom") if isinstance(call.get(name), dict)), call)
    kind = str(call.get("type"))
    name = _string(inner, "name", "toolName", "tool_name")
    value = _first_of(inner, "arguments", "args", "input", "action", "operation")
    if name is None and kind.endswith("_call") and kind not in ("function_call", "tool_call", "custom_tool_call"):
        name = kind.removesuffix("_call")
        value = value or {key: each for key, each in call.items() if key not in _NO_ARGUMENTS}
    if name is None:
        raise CannotMendError(f"{place}: the call names no function")
    arguments = _arguments({"input": value} if kind.startswith("custom") else value)
    id_ = _string(call, "call_id", "tool_use_id", "tool_call_id", "toolCallId", "id")
    return {"type": "call", "id": id_, "name": name, "arguments": arguments}


_NO_ARGUMENTS = frozenset(("id", "type", "call_id", "status", "container_id", *_OUTCOMES))


def _first_of(part: _Object, *names: str) -> Any:
    return next((part[name] for name in names if part.get(name) is not None), None)


def _string(part: _Object, *names: str) -> str | None:
    return next((value for name in names if isinstance(value := part.get(name), str)), None)


def _arguments(value: Any) -> str:
    """The arguments of a call as JSON of an object. What is no object is kept whole as one argument."""
    if isinstance(value, str) and _is_object(value):
        return value
    for _ in range(2):  # it may be encoded twice
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value, strict=False, parse_constant=_no_number)
    return json.dumps(
        value if isinstance(value, dict) else {} if value in (None, "") else {"arguments": value}, ensure_ascii=False
    )


def _is_object(text: str) -> bool:
    """Whether the frontend takes it for an object of JSON."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text, parse_constant=_no_number)
        return isinstance(value, dict) and not _HALF.search(json.dumps(value, ensure_ascii=False))
    return False


_HALF = re.compile("[\ud800-\udfff]")


def _no_number(name: str) -> None:
    raise ValueError(name)


def _name_calls(entries: list[_Entry]) -> None:
    """Calls and results without an id get one, in the order in which they came."""
    waiting: list[str] = []
    for index, entry in enumerate(entries):
        for number, part in enumerate(entry.parts):
            if part["type"] == "call":
                part["id"] = part["id"] or f"call_{index}_{number}"
                waiting.append(part["id"])
            elif part["type"] == "result":
                part["id"] = part["id"] or (waiting[0] if waiting else "unknown")
                if part["id"] in waiting:
                    waiting.remove(part["id"])


def _chat(entry: _Entry) -> list[_Object]:
    """A message of chats, behind messages of the tools whose results it has."""
    source = entry.source if entry.role else {}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": each["text"]} for each in entry.of("result")]
    if entry.role == "tool":
        return [{**source, **results[0]}]
    texts, calls, thoughts = entry.of("text"), entry.of("call"), [each["text"] for each in entry.of("thought")]
    if not (texts or calls or thoughts) and (results or not entry.role):
        return list(results)
    content = source.get("content")
    message = {**source, "role": entry.role or ("assistant" if calls else "user")}
    message["content"] = content if isinstance(content, str) else texts or (None if calls else "")
    for name in ("tool_calls", "function_call"):
        message.pop(name, None)
    if calls:
        message["tool_calls"] = [
            {"id": each["id"], "type": "function", "function": {"name": each["name"], "arguments": each["arguments"]}}
            for each in calls
        ]
    if any(thoughts):
        message.setdefault("reasoning_content", "\n".join(filter(None, thoughts)))
    if "reasoning_content" in message:
        message.pop("reasoning", None)
    if message.get("audio") == {}:
        del message["audio"]
    return [*results, message]


def _message(entry: _Entry) -> list[_Object]:
    """Messages of Anthropic's API, where results are the user's."""
    role = {"developer": "system", "tool": "user", "": "assistant"}.get(entry.role, entry.role)
    if isinstance(entry.source.get("content"), str) and entry.role != "tool" and not entry.of("call"):
        return [{**entry.source, "role": role}]
    runs: list[_Object] = []
    for part in entry.parts:
        of = "user" if part["type"] == "result" else role
        if not runs or runs[-1]["role"] != of:
            runs.append({"role": of, "content": []})
        runs[-1]["content"].append(_block(part))
    return runs or ([{"role": role, "content": ""}] if entry.role else [])


def _block(part: _Object) -> _Object:
    match part["type"]:
        case "thought":
            return {"type": "thinking", "thinking": part["text"], "signature": part["signature"]}
        case "call":
            return {"type": "tool_use", "id": part["id"], "name": part["name"], "input": json.loads(part["arguments"])}
        case "result":
            return {"type": "tool_result", "tool_use_id": part["id"], "content": part["texts"] or part["text"]}
    return part


def _items(entry: _Entry) -> list[_Object]:
    """Items of `/v1/responses`."""
    source, content = entry.source, entry.source.get("content")
    if source.get("type") == "reasoning":
        return [source]
    items: list[_Object] = []
    texts = [part["text"] for part in entry.of("text")]
    if texts or (entry.role not in ("", "tool") and not entry.parts):
        parts = [{"type": "input_text", "text": text} for text in texts]
        is_plain = entry.role == "assistant" or not isinstance(content, list)
        known = {key: value for key, value in source.items() if key != "tool_calls"} if entry.role else {}
        items.append({**known, "role": entry.role or "user", "content": "".join(texts) if is_plain else parts})
    for part in entry.parts:
        if part["type"] == "call":
            item = {"call_id": part["id"], "name": part["name"], "arguments": part["arguments"]}
            items.append({**(source if source.get("type") == "function_call" else {}), "type": "function_call", **item})
        elif part["type"] == "result":
            items.append({"type": "function_call_output", "call_id": part["id"], "output": part["text"]})
        elif part["type"] == "thought" and part["text"]:
            summary = {"type": "summary_text", "text": part["text"]}
            items.insert(0, {"type": "reasoning", "summary": [summary]})
    return items


_WRITERS: Mapping[str, Callable[[_Entry], list[_Object]]] = {CHATS: _chat, MESSAGES: _message, RESPONSES: _items}
