"""Dynamo's agentic Mooncake rows: requests with dependencies, delays and tool waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.formats.chain import Call, rounds_of, shared_by_blocks
from workloads.formats.loader import LoadOptions, register
from workloads.formats.mooncake import BLOCK_TOKENS
from workloads.formats.source import count_of, read_json_lines, seconds_of, source_files
from workloads.trace import Session

_MS = 1e-3

Row = tuple[str, dict[str, Any]]


@register("agentic-mooncake", "Dynamo's agentic Mooncake JSONL (wait_for, delay, tool_wait_ms)")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session for each `session_id`, its rows in the order of their timestamps.

    The gap before a round is `delay` plus `tool_wait_ms`. A row's wait for ANOTHER session (a sub-agent) is
    no dependency in the trace: that session starts at its own recorded time.
    """
    by_session: dict[str, list[Row]] = {}
    for file in source_files(path, ".jsonl"):
        for where, row in read_json_lines(file):
            if not count_of(row, "input_length", where) or not count_of(row, "output_length", where):
                options.note(f"{where}: no tokens, left out")
                continue
            by_session.setdefault(str(row.get("session_id") or row.get("request_id") or where), []).append((where, row))
    for name, rows in by_session.items():
        rows.sort(key=lambda item: _start_s(*item))
        yield Session(session_id=name, arrival_s=_start_s(*rows[0]), rounds=rounds_of(list(_calls(rows)), rows[0][0]))


def _calls(rows: list[Row]) -> Iterator[Call]:
    previous: dict[str, Any] | None = None
    for where, row in rows:
        shared = None
        if previous:
            before_tokens = count_of(previous, "input_length", where)
            shared = shared_by_blocks(previous.get("hash_ids"), row.get("hash_ids"), BLOCK_TOKENS, before_tokens)
            if shared is None and row.get("prefix_reset"):
                shared = 0
        waits = (seconds_of(row, key, where, unit_s=_MS) for key in ("delay", "tool_wait_ms"))
        yield Call(
            prompt_tokens=count_of(row, "input_length", where),
            output_tokens=count_of(row, "output_length", where),
            gap_s=sum(wait or 0.0 for wait in waits),
            shared_tokens=shared,
        )
        previous = row


def _start_s(where: str, row: dict[str, Any]) -> float:
    return seconds_of(row, "timestamp", where, unit_s=_MS) or 0.0
