"""kv-cache-tester: anonymised coding-agent sessions with token counts, block hashes, think and API times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.formats.chain import Call, rounds_of
from workloads.formats.loader import LoadOptions, register
from workloads.formats.source import as_list, as_object, count_of, file_stem, read_json, seconds_of, source_files
from workloads.trace import Session

DEFAULT_BLOCK_TOKENS = 64


@register(
    "kv-cache-tester", "kv-cache-tester traces (coding agents; real gaps; arrivals 0: each file starts at its own 0)"
)
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
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
