"""Formats of observability tools: OpenTelemetry and OpenInference spans, Langfuse, LiteLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ampd.errors import UserError
from workloads.formats.chat import (
    Usage,
    answer_of,
    prompt_of,
    role_of,
    session_name,
    usage_of,
    with_answer,
)
from workloads.formats.loader import Row, Rows, as_object, count_of, first_of, parsed, part_of, text_of, time_s
from workloads.formats.rounds import Request

# -- spans of model calls: `gen_ai.*` (OpenTelemetry), `llm.*` (OpenInference, also nested as in TRAIL)

_NESTS = ("resourceSpans", "resource_spans", "scopeSpans", "scope_spans", "instrumentationLibrarySpans", "batches")
_NESTS_TOO = ("spans", "child_spans", "children", "data", "trace", "traces")
_SESSIONS = ("gen_ai.conversation.id", "session.id", "session_id", "langfuse.session.id", "thread.id")
_SESSIONS_TOO = ("traceloop.association.properties.session_id", "langsmith.trace.session_id", "metadata.session_id")
_CALLS = ("chat", "text_completion", "completion", "generate_content", "message", "generate", "responses")
_PROMPTS = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.token_count.prompt",
    "llm.usage.prompt_tokens",
)
_OUTPUTS = (
    *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
    "llm.usage.completion_tokens",
)
_CACHED = (
    *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
    *("gen_ai.usage.input_tokens.cached", "llm.token_count.prompt_details.cache_read"),
)
_WRITTEN = ("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens")
_NUMBERED = re.compile(r"(llm\.input_messages|gen_ai\.prompt|gen_ai\.input\.messages)\.(\d+)\.(.+)")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?")


@dataclass(slots=True)
class _Span:
    where: str
    name: str
    trace: str
    parent: str
    raw: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def operation(self) -> str:
        """What the span did; empty: it does not say so."""
        kind = first_of(self.attributes, "gen_ai.operation.name", "openinference.span.kind", "traceloop.span.kind")
        return str(kind or first_of(self.attributes, "llm.request.type") or "").lower()

    @property
    def is_call(self) -> bool:
        if self.operation:
            return self.operation in ("llm", *_CALLS)
        return any(self.attributes.get(key) is not None for key in (*_PROMPTS, *_OUTPUTS))

    @property
    def is_agent(self) -> bool:
        return self.operation in ("agent", "invoke_agent", "create_agent")


def read_otel(rows: Rows) -> Iterator[Request]:
    """One session for each conversation (without one: each trace), and for each agent that another agent calls.

    A framework and the client that it uses may both write a span of the same call; the inner one counts.
    """
    spans: dict[str, _Span] = {}
    for row in rows:
        for span_id, span in _spans(row.data, row.where, "", text_of(row.data, "trace_id", "traceId", "traceID") or ""):
            spans[span_id] = span
    outer = {above for span in spans.values() if span.is_call for above, item in _above(span, spans) if item.is_call}
    agents: dict[str, dict[str, int]] = {}
    found: list[tuple[str, str, Request]] = []
    for span_id, span in spans.items():
        if span.is_call and span_id not in outer:
            session = text_of(span.attributes, *_SESSIONS, *_SESSIONS_TOO) or span.trace or span.where
            found.append((session, _agent_of(span, spans), _span_request(span)))
    found.sort(key=lambda item: item[2].start_s or 0.0)
    for session, agent, _ in found:
        agents.setdefault(session, {}).setdefault(agent, len(agents[session]) + 1)
    for session, agent, request in found:
        number = agents[session][agent]
        yield replace(request, session=session if len(agents[session]) == 1 else f"{session}/agent{number}")


def _spans(value: Any, where: str, parent: str, trace: str) -> Iterator[tuple[str, _Span]]:
    if isinstance(value, list):
        for item in value:
            yield from _spans(item, where, parent, trace)
        return
    raw = as_object(value, where)
    found = first_of(raw, "attributes", "span_attributes", "tags")
    flat = (
        found if found is not None else {key[11:]: item for key, item in raw.items() if key.startswith("attributes.")}
    )
    if flat or "child_spans" in raw:
        context = part_of(raw, "context")
        span_id = text_of(raw, "span_id", "spanId", "spanID", "context.span_id") or text_of(context, "span_id") or ""
        trace = (
            text_of(raw, "trace_id", "traceId", "traceID", "context.trace_id") or text_of(context, "trace_id") or trace
        )
        references = raw.get("references") or [{}]
        above = (
            text_of(raw, "parent_span_id", "parentSpanId", "parent_id") or text_of(references[0], "spanID") or parent
        )
        attributes = _attributes(flat)
        for event in raw.get("events") or ():
            attributes = _attributes(event.get("attributes")) | attributes if isinstance(event, dict) else attributes
        span_id = span_id or f"{where}/{len(attributes)}/{id(raw)}"
        yield (
            span_id,
            _Span(where, str(first_of(raw, "name", "span_name", "operationName")), trace, above, raw, attributes),
        )
        parent = span_id
    for key in (*_NESTS, *_NESTS_TOO):
        if isinstance(raw.get(key), list | dict):
            yield from _spans(raw[key], where, parent, trace)


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as one flat object: from OTLP's and Jaeger's lists of keys and values, and from nested objects."""
    value = parsed(value)
    if isinstance(value, list):
        pairs = (item if isinstance(item, dict) else dict(zip(("key", "value"), item, strict=False)) for item in value)
        value = {str(item.get("key")): _plain(item.get("value")) for item in pairs}
    flat: dict[str, Any] = {}
    for key, item in (value or {}).items():
        nested = dict(enumerate(item)) if isinstance(item, list) and item and isinstance(item[0], dict) else item
        if isinstance(nested, dict):
            flat |= {
                f"{key}.{inner}": deep for inner, deep in _attributes({str(k): v for k, v in nested.items()}).items()
            }
            flat[str(key)] = item
        else:
            flat[str(key)] = item
    return flat


def _plain(value: Any) -> Any:
    """OTLP writes `{"intValue": "5"}` for 5."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    (kind, inner), = value.items()  # fmt: skip
    if kind == "arrayValue":
        return [_plain(item) for item in inner.get("values") or ()]
    if kind == "kvlistValue":
        return {str(item.get("key")): _plain(item.get("value")) for item in inner.get("values") or ()}
    return inner if str(kind).endswith("Value") else value


def _above(span: _Span, spans: dict[str, _Span]) -> Iterator[tuple[str, _Span]]:
    seen: set[str] = set()
    while span.parent in spans and span.parent not in seen:
        seen.add(span.parent)
        yield span.parent, spans[span.parent]
        span = spans[span.parent]


def _agent_of(span: _Span, spans: dict[str, _Span]) -> str:
    """An agent that no agent called goes on in the conversation's next trace; each call of another is a new context."""
    agents = [(span_id, item) for span_id, item in _above(span, spans) if item.is_agent]
    if not agents:
        return text_of(span.attributes, "gen_ai.agent.id", "gen_ai.agent.name") or ""
    (innermost, agent), *outer = agents
    return innermost if outer else text_of(agent.attributes, "gen_ai.agent.id", "gen_ai.agent.name") or agent.name


def _span_request(span: _Span) -> Request:
    attributes, where = span.attributes, span.where
    start_s = time_s(
        span.raw, "start_time", "startTimeUnixNano", "start_time_unix_nano", "startTime", "timestamp", where=where
    )
    end_s = time_s(span.raw, "end_time", "endTimeUnixNano", "end_time_unix_nano", "endTime", where=where)
    if end_s is None and start_s is not None and span.raw.get("duration") is not None:
        end_s = start_s + _duration_s(span.raw["duration"], where)
    usage = _span_usage(attributes, where)
    messages, system = _span_messages(attributes)
    request = Request(
        where,
        start_s=start_s,
        end_s=end_s,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        messages=messages,
        system_messages=system,
    )
    output = parsed(first_of(attributes, "gen_ai.output.messages", "gen_ai.completion", "output.value"))
    numbered = [str(attributes[key]) for key in sorted(attributes) if re.match(_NUMBERED_OUTPUT, key)]
    return with_answer(request, {"content": "\n".join(numbered)} if numbered and output is None else answer_of(output))


_NUMBERED_OUTPUT = r"(llm\.output_messages|gen_ai\.completion)\.\d+\.(?!.*(role|finish_reason|\.id)$)"


def _span_usage(attributes: dict[str, Any], where: str) -> Usage:
    """By the convention the cache's tokens are in the input's; a client that counts them apart has more of them."""
    prompt, output = (count_of(attributes, *keys, where=where) for keys in (_PROMPTS, _OUTPUTS))
    cached, written = (count_of(attributes, *keys, where=where) for keys in (_CACHED, _WRITTEN))
    if prompt is not None and (cached or 0) + (written or 0) > prompt:
        prompt += (cached or 0) + (written or 0)
    return Usage(prompt or None, output or None, cached) if prompt or output else Usage(prompt, output)


def _span_messages(attributes: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """The prompt's messages from JSON or numbered attributes; else the raw input as one message."""
    whole = parsed(first_of(attributes, "gen_ai.input.messages", "gen_ai.prompt"))
    if isinstance(whole, list):
        system = first_of(attributes, "gen_ai.system_instructions", "gen_ai.system.instructions")
        tools = first_of(attributes, "gen_ai.tool.definitions", "gen_ai.request.tools")
        prompt = prompt_of({"messages": whole, "system": parsed(system), "tools": tools})
        return (prompt.messages, prompt.system_messages) if prompt else ((), 0)
    by_number: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if (match := _NUMBERED.fullmatch(key)) and not isinstance(value, dict | list):
            by_number.setdefault(int(match[2]), {})[match[3].removeprefix("message.")] = value
    if by_number:
        parts = [by_number[number] for number in sorted(by_number)]
        roles = [role_of(part) for part in parts]
        system_messages = next((at for at, role in enumerate(roles) if role != "system"), 0)
        return tuple(
            "\n".join(str(part[key]) for key in sorted(part) if key != "role") for part in parts
        ), system_messages
    raw = first_of(attributes, "input.value", "gen_ai.prompt", "traceloop.entity.input")
    prompt = prompt_of({"messages": raw}) if raw else None
    return (prompt.messages, prompt.system_messages) if prompt else ((), 0)


def _duration_s(value: Any, where: str) -> float:
    """ISO 8601, or microseconds as Jaeger has them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) * 1e-6
    match = _DURATION.fullmatch(str(value or ""))
    if not match:
        raise UserError(f"{where}: {value!r} is not an ISO 8601 duration like PT24.68S")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# -- Langfuse: observations as JSON, JSON lines, CSV or Parquet, or traces with their observations


def read_langfuse(rows: Rows) -> Iterator[Request]:
    """Observations of the type GENERATION. Sessions by session, else by trace."""
    sessions: dict[str, str] = {}
    found = list(_observations(rows, sessions))
    for where, item in found:
        details = parsed(first_of(item, "usageDetails", "usage_details", "provided_usage_details"))
        usage = usage_of(dict(details) if isinstance(details, list) else details, where)  # Parquet has pairs
        if usage == Usage():
            usage = usage_of(parsed(item.get("usage")), where)
        if usage == Usage():
            usage = usage_of({key: item.get(key) for key in item if key not in ("input", "output")}, where)
        trace = text_of(item, "traceId", "trace_id")
        prompt = prompt_of({"messages": parsed(item.get("input"))})
        request = Request(
            where,
            session=text_of(item, "sessionId", "session_id") or sessions.get(str(trace)) or trace,
            start_s=time_s(item, "startTime", "start_time", where=where),
            end_s=time_s(item, "endTime", "end_time", where=where),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            messages=prompt.messages if prompt else (),
            system_messages=prompt.system_messages if prompt else 0,
        )
        yield with_answer(request, answer_of(item.get("output")))


def _observations(rows: Iterable[Row], sessions: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in rows:
        pending: list[Any] = [row.data]
        while pending:
            item = pending.pop(0)
            if not isinstance(item, dict):
                continue
            inner = [nested for key in ("traces", "observations") if isinstance(nested := parsed(item.get(key)), list)]
            trace = part_of(item, "trace") or item
            name, session = text_of(trace, "id"), text_of(trace, "sessionId", "session_id")
            if inner and name and session:
                sessions[name] = session
            pending += [each for nested in inner for each in nested]
            if str(item.get("type", "")).upper() == "GENERATION":
                yield row.where, item


# -- LiteLLM: rows of its spend logs, or the payloads of its callbacks


def read_litellm(rows: Rows) -> Iterator[Request]:
    """Calls that failed, or that LiteLLM's own cache answered, are left out."""
    for row in rows:
        item, where = row.data, row.where
        if str(item.get("cache_hit")).lower() == "true":
            rows.leave_out("answers of LiteLLM's own cache", where)
            continue
        if "embedding" in str(item.get("call_type")):
            continue
        sent = parsed(item.get("proxy_server_request"))
        body = sent.get("body", sent) if isinstance(sent, dict) else {}
        prompt = prompt_of({"messages": parsed(item.get("messages"))}) or prompt_of(body)
        metadata = parsed(item.get("metadata"))
        extra = metadata.get("usage_object") if isinstance(metadata, dict) else None
        usage = usage_of(item, where)
        request = Request(
            where,
            session=session_name(item, body) or text_of(item, "trace_id"),
            start_s=time_s(item, "startTime", "start_time", where=where),
            end_s=time_s(item, "endTime", "end_time", where=where),
            prompt_tokens=usage.prompt_tokens or 0,
            output_tokens=usage.output_tokens or 0,
            cached_tokens=usage_of(extra, where).cached_tokens,
            messages=prompt.messages if prompt else (),
            system_messages=prompt.system_messages if prompt else 0,
        )
        yield with_answer(request, answer_of(item.get("response") or None))
