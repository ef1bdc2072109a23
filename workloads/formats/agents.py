"""Formats of recorded agents: TraceLab, TRAIL, kv-cache-tester."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.loader import (
    Call,
    LoadOptions,
    Row,
    as_list,
    as_object,
    common_prefix,
    count_of,
    file_stem,
    only_file,
    read_json,
    read_json_lines,
    rounds_of,
    rows_by_session,
    seconds_of,
    source_files,
    timestamp_s,
)
from workloads.trace import Session

# -- TraceLab: coding-agent rounds with token counts and the wall time of every tool

_INPUT_EVENTS = ("user_message", "tool_result")


def load_tracelab(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session for each `session_id`. A release has several tables of the same sessions, so a folder may hold one.

    `prefix_tokens` counts the tokens in the provider's cache, which also shrinks when an entry expires. So it is used
    only if the prompt itself shows a rewrite, because it is not longer than the context before it.
    """
    files, counts = [only_file(path, ".jsonl")], ("input_tokens_total", "output_tokens")
    by_session = rows_by_session(files, lambda row, _: str(row.get("session_id")), counts, options.note)
    starts_s: dict[str, float | None] = {}
    for name, rows in by_session.items():
        rows.sort(key=lambda item: count_of(item[1], "round_index", item[0]))
        starts_s[name] = _last_event_s(*rows[0], inputs=True)
    known = [start_s for start_s in starts_s.values() if start_s is not None]
    for name, rows in by_session.items():
        start_s = starts_s[name]
        arrival_s = round(start_s - min(known), 6) if start_s is not None else 0.0
        yield Session(session_id=name, arrival_s=arrival_s, rounds=rounds_of(list(_tracelab_calls(rows)), rows[0][0]))


def _tracelab_calls(rows: list[Row]) -> Iterator[Call]:
    previous: Row | None = None
    context_tokens = 0
    for where, row in rows:
        prompt_tokens, output_tokens = count_of(row, "input_tokens_total", where), count_of(row, "output_tokens", where)
        rewritten = prompt_tokens <= context_tokens and "prefix_tokens" in row
        yield Call(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            gap_s=_event_gap_s(previous, (where, row)) if previous else 0.0,
            shared_tokens=count_of(row, "prefix_tokens", where) if rewritten else None,
        )
        previous, context_tokens = (where, row), prompt_tokens + output_tokens


def _event_gap_s(previous: Row, current: Row) -> float:
    """From the model's last event to the last input of the next round; else the longest tool of the round before."""
    end_s, start_s = _last_event_s(*previous, inputs=False), _last_event_s(*current, inputs=True)
    if end_s is not None and start_s is not None:
        return max(start_s - end_s, 0.0)
    where, row = previous
    walls = (seconds_of(tool, "tool_wall_latency_ms", where, unit_s=1e-3) for tool in row.get("tools") or [])
    return max((wall for wall in walls if wall is not None), default=0.0)


def _last_event_s(where: str, row: dict[str, Any], *, inputs: bool) -> float | None:
    times = [
        timestamp_s(event["timestamp"], where)
        for event in row.get("timing_events") or []
        if event.get("timestamp") and (event.get("event_type") in _INPUT_EVENTS) is inputs
    ]
    return max(times, default=None)


# -- TRAIL and other OpenInference traces: nested spans of an agent run; one LLM span is one round

_KIND = "openinference.span.kind"
_MESSAGE_KEY = re.compile(r"llm\.input_messages\.(\d+)\.message\.(.+)")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?")


@dataclass(frozen=True, slots=True)
class _Span:
    start_s: float
    end_s: float
    agent: str
    attributes: dict[str, Any]


def load_trail(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session for each agent of each trace. An agent that is called by another has its own context.

    The gap before a round is the time between the end of the agent's previous LLM span and the start of this one:
    its tools, and the agents that it called. Token counts are the recorded ones, else counted from the words.
    Arrivals are the recorded start times, from the earliest of the input on.
    """
    found: list[tuple[float, str, tuple[_Span, ...], str]] = []
    for where, name, trace in _traces(path):
        llm_spans = sorted(_llm_spans(trace, where), key=lambda span: span.start_s)
        if not llm_spans:
            options.note(f"{where}: no LLM span, left out")
            continue
        agents = list(dict.fromkeys(span.agent for span in llm_spans))
        for number, agent in enumerate(agents, start=1):
            spans = tuple(span for span in llm_spans if span.agent == agent)
            session_id = name if len(agents) == 1 else f"{name}/agent{number}"
            found.append((spans[0].start_s, session_id, spans, where))
    origin_s = min((start_s for start_s, *_ in found), default=0.0)
    for start_s, session_id, spans, where in found:
        rounds = rounds_of(_span_calls(spans, options, where), where)
        yield Session(session_id=session_id, arrival_s=round(start_s - origin_s, 6), rounds=rounds)


def _traces(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for file in source_files(path, ".json", ".jsonl"):
        if file.name.removesuffix(".gz").endswith(".jsonl"):
            for where, trace in read_json_lines(file):
                yield where, str(trace.get("trace_id") or where), trace
            continue
        content = read_json(file)
        for index, trace in enumerate(content if isinstance(content, list) else [content]):
            entry = as_object(trace, str(file))
            default = file_stem(file) if not isinstance(content, list) else f"{file_stem(file)}-{index}"
            yield f"{file}: trace {index}", str(entry.get("trace_id") or default), entry


def _llm_spans(trace: dict[str, Any], where: str) -> Iterator[_Span]:
    pending = [(span, "") for span in as_list(trace.get("spans"), f"{where}: spans")]
    while pending:
        raw, agent = pending.pop()
        span = as_object(raw, where)
        attributes = span.get("span_attributes") or {}
        kind = str(attributes.get(_KIND) or "").upper()
        if kind == "LLM":
            start_s = timestamp_s(span.get("timestamp"), where)
            yield _Span(start_s, start_s + _duration_s(span.get("duration"), where), agent, attributes)
        inner = str(span.get("span_id")) if kind == "AGENT" else agent
        pending += [(child, inner) for child in span.get("child_spans") or []]


def _span_calls(spans: Sequence[_Span], options: LoadOptions, where: str) -> list[Call]:
    calls: list[Call] = []
    previous: _Span | None = None
    previous_messages: list[str] = []
    for span in spans:
        messages = _messages(span.attributes)
        common = common_prefix(previous_messages, messages)
        prompt_tokens = _recorded(span.attributes, "prompt") or sum(map(options.count_tokens, messages)) or 1
        shared = None
        if previous and messages:
            whole = common == len(previous_messages)
            shared = calls[-1].prompt_tokens if whole else _part(messages[:common], messages, prompt_tokens, options)
        output = str(span.attributes.get("output.value") or "")
        calls.append(
            Call(
                prompt_tokens=prompt_tokens,
                output_tokens=_recorded(span.attributes, "completion") or options.count_tokens(output) or 1,
                gap_s=span.start_s - previous.end_s if previous else 0.0,
                shared_tokens=shared,
                text="\n".join(messages[common:]) if options.with_text else None,
            )
        )
        previous, previous_messages = span, messages
    if not calls:
        raise UserError(f"{where}: no LLM span")
    return calls


def _messages(attributes: dict[str, Any]) -> list[str]:
    """The prompt's messages as words, from the flattened attributes; else the raw input as one message."""
    by_number: dict[int, list[tuple[str, str]]] = {}
    for key, value in attributes.items():
        if match := _MESSAGE_KEY.fullmatch(key):
            by_number.setdefault(int(match[1]), []).append((match[2], str(value)))
    if by_number:
        return ["\n".join(value for _, value in sorted(by_number[number])) for number in sorted(by_number)]
    raw = attributes.get("input.value")
    return [str(raw)] if raw else []


def _part(kept: Sequence[str], messages: Sequence[str], prompt_tokens: int, options: LoadOptions) -> int:
    whole = sum(map(options.count_tokens, messages))
    return prompt_tokens * sum(map(options.count_tokens, kept)) // whole if whole else 0


def _recorded(attributes: dict[str, Any], which: str) -> int | None:
    value = attributes.get(f"llm.token_count.{which}")
    try:
        return int(value) if value is not None else None
    except (TypeError, ValueError):
        return None


def _duration_s(value: Any, where: str) -> float:
    match = _DURATION.fullmatch(str(value or ""))
    if not match:
        raise UserError(f"{where}: {value!r} is not an ISO 8601 duration like PT24.68S")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


# -- kv-cache-tester: anonymised coding-agent sessions with token counts, block hashes, think and API times

DEFAULT_BLOCK_TOKENS = 64


def load_kv_cache_tester(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session per file, and one per nested sub-agent, which has its own context."""
    for file in source_files(path, ".json"):
        trace = as_object(read_json(file), str(file))
        name = str(trace.get("id") or file_stem(file))
        block_tokens = int(trace.get("block_size") or DEFAULT_BLOCK_TOKENS)
        requests = as_list(trace.get("requests"), f"{file}: requests")
        yield from _sessions(requests, name, 0.0, block_tokens, str(file), options)


def _sessions(
    requests: list[Any], name: str, arrival_s: float, block_tokens: int, where: str, options: LoadOptions
) -> Iterator[Session]:
    own: list[dict[str, Any]] = []
    nested: list[tuple[dict[str, Any], list[Any]]] = []
    for index, entry in enumerate(requests):
        request = as_object(entry, f"{where}: request {index}")
        if isinstance(request.get("requests"), list):
            nested.append((request, request["requests"]))
        elif request.get("type") == "subagent":
            options.note(f"{where}: request {index}: a sub-agent without its requests, left out")
        elif request.get("in") == 0 or request.get("out") == 0:
            options.note(f"{where}: request {index}: no tokens, left out")
        else:
            own.append(request)
    if own:
        calls = list(_calls(own, block_tokens, where))
        yield Session(session_id=name, arrival_s=arrival_s, rounds=rounds_of(calls, where))
    for number, (agent, inner) in enumerate(nested, start=1):
        start_s = seconds_of(agent, "t", where) or 0.0
        yield from _sessions(inner, f"{name}/agent{number}", arrival_s + start_s, block_tokens, where, options)


def _calls(requests: list[dict[str, Any]], block_tokens: int, where: str) -> Iterator[Call]:
    previous: dict[str, Any] | None = None
    for request in requests:
        yield Call(
            prompt_tokens=count_of(request, "in", where),
            output_tokens=count_of(request, "out", where),
            gap_s=_gap_s(previous, request, where),
            hashes=request.get("hash_ids") or (),
            block_tokens=block_tokens,
        )
        previous = request


def _gap_s(previous: dict[str, Any] | None, request: dict[str, Any], where: str) -> float:
    """`think_time` if recorded, else the time between the end of the previous request and this one."""
    if previous is None:
        return 0.0
    think_s = seconds_of(request, "think_time", where)
    if think_s is not None:
        return think_s
    start_s, before_s = seconds_of(request, "t", where), seconds_of(previous, "t", where)
    if start_s is None or before_s is None:
        return 0.0
    return start_s - before_s - (seconds_of(previous, "api_time", where) or 0.0)
