"""TRAIL and other OpenInference traces: nested spans of an agent run; one LLM span is one round."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.chain import Call, common_prefix, rounds_of
from workloads.formats.loader import LoadOptions, register
from workloads.formats.source import (
    as_list,
    as_object,
    file_stem,
    read_json,
    read_json_lines,
    source_files,
    timestamp_s,
)
from workloads.trace import Session

_KIND = "openinference.span.kind"
_MESSAGE_KEY = re.compile(r"llm\.input_messages\.(\d+)\.message\.(.+)")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?")


@dataclass(frozen=True, slots=True)
class _Span:
    start_s: float
    end_s: float
    agent: str
    attributes: dict[str, Any]


@register("trail", "TRAIL / OpenInference spans (LLM and TOOL spans, recorded times)")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
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
        rounds = rounds_of(_calls(spans, options, where), where)
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


def _calls(spans: Sequence[_Span], options: LoadOptions, where: str) -> list[Call]:
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
