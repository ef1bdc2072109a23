"""Dynamo's own request traces (`DYN_REQUEST_TRACE=1`, schema dynamo.request.trace.v1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workloads.formats.chain import Call, rounds_of
from workloads.formats.loader import LoadOptions, register
from workloads.formats.source import as_object, count_of, read_json_lines, seconds_of, source_files
from workloads.trace import Session

_MS = 1e-3
_REQUEST_END = "request_end"


@dataclass(frozen=True, slots=True)
class _Request:
    where: str
    start_s: float
    end_s: float
    call: Call


@register("dynamo", "Dynamo request traces (request_end records; sessions by agent_context)")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session for each `agent_context.session_id`; a request without one stands alone.

    The gap before a round is the time between the end of the session's previous request and its arrival. Requests
    of one session that ran at the same time follow each other without a gap.
    """
    by_session: dict[str, list[_Request]] = {}
    for file in source_files(path, ".jsonl", ".json"):
        for where, record in read_json_lines(file):
            event = as_object(record.get("event", record), where)
            if event.get("event_type") != _REQUEST_END:
                continue
            request = as_object(event.get("request"), f"{where}: request")
            if not request.get("input_tokens") or not request.get("output_tokens"):
                options.note(f"{where}: no tokens, left out")
                continue
            context = event.get("agent_context") or {}
            name = str(context.get("session_id") or request.get("request_id") or where)
            by_session.setdefault(name, []).append(_request(request, event, where))
    origin_s = min((item.start_s for requests in by_session.values() for item in requests), default=0.0)
    for name, requests in by_session.items():
        requests.sort(key=lambda item: item.start_s)
        arrival_s = round(requests[0].start_s - origin_s, 6)
        yield Session(session_id=name, arrival_s=arrival_s, rounds=rounds_of(_calls(requests), requests[0].where))


def _request(request: dict[str, Any], event: dict[str, Any], where: str) -> _Request:
    end_s = seconds_of(event, "event_time_unix_ms", where, unit_s=_MS) or 0.0
    start_s = seconds_of(request, "request_received_ms", where, unit_s=_MS)
    total_s = seconds_of(request, "total_time_ms", where, unit_s=_MS)
    if start_s is None:
        start_s = end_s - (total_s or 0.0)
    replay = request.get("replay") or {}
    return _Request(
        where=where,
        start_s=start_s,
        end_s=start_s + total_s if total_s is not None else end_s,
        call=Call(
            prompt_tokens=count_of(request, "input_tokens", where),
            output_tokens=count_of(request, "output_tokens", where),
            hashes=list(replay.get("input_sequence_hashes") or []),
            block_tokens=int(replay.get("trace_block_size") or 0),
        ),
    )


def _calls(requests: list[_Request]) -> list[Call]:
    ends_s = [requests[0].start_s, *(item.end_s for item in requests)]
    return [replace(item.call, gap_s=item.start_s - end_s) for item, end_s in zip(requests, ends_s, strict=False)]
