"""Mooncake traces, also with sessions as Dynamo's replay reads them (`session_id`, `delay`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.formats.chain import Call, rounds_of, shared_by_blocks
from workloads.formats.loader import LoadOptions, register
from workloads.formats.source import count_of, read_json_lines, seconds_of, source_files
from workloads.trace import Round, Session

BLOCK_TOKENS = 512
_MS = 1e-3

Row = tuple[str, dict[str, Any]]


@register("mooncake", "Mooncake JSONL with whole prompts; rows of one session_id are its rounds, others stand alone")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
    """Whole prompts: `hash_ids` (one per 512 tokens) show how much of the previous prompt a round keeps.

    The gap before a round is its `delay`; without one, the difference of the two timestamps, which then includes the
    time that the original service took.
    """
    for name, rows in _sessions(path, options):
        yield Session(session_id=name, arrival_s=_arrival_s(rows), rounds=rounds_of(list(_calls(rows)), rows[0][0]))


@register("mooncake-delta", "Mooncake JSONL whose later rows hold only what a round adds (Dynamo's delta variant)")
def load_delta(path: Path, options: LoadOptions) -> Iterator[Session]:
    """`input_length` of a session's later rows is the increment; nothing is ever rewritten."""
    for name, rows in _sessions(path, options):
        rounds = tuple(
            Round(
                incr_tokens=count_of(row, "input_length", where),
                output_tokens=count_of(row, "output_length", where),
                tool_s=_gap_s(rows[index - 1][1], row, where) if index else 0.0,
            )
            for index, (where, row) in enumerate(rows)
        )
        yield Session(session_id=name, arrival_s=_arrival_s(rows), rounds=rounds)


def _sessions(path: Path, options: LoadOptions) -> Iterator[tuple[str, list[Row]]]:
    by_session: dict[str, list[Row]] = {}
    for file in source_files(path, ".jsonl", ".json"):
        for number, (where, row) in enumerate(read_json_lines(file), start=1):
            if not count_of(row, "input_length", where) or not count_of(row, "output_length", where):
                options.note(f"{where}: no tokens, left out")
                continue
            name = row.get("session_id")
            by_session.setdefault(str(name) if name is not None else f"{file.name}:{number}", []).append((where, row))
    yield from by_session.items()


def _calls(rows: list[Row]) -> Iterator[Call]:
    previous: dict[str, Any] | None = None
    for where, row in rows:
        shared = None
        if previous:
            before_tokens = count_of(previous, "input_length", where)
            shared = shared_by_blocks(previous.get("hash_ids"), row.get("hash_ids"), BLOCK_TOKENS, before_tokens)
        yield Call(
            prompt_tokens=count_of(row, "input_length", where),
            output_tokens=count_of(row, "output_length", where),
            gap_s=_gap_s(previous, row, where) if previous else 0.0,
            shared_tokens=shared,
        )
        previous = row


def _gap_s(previous: dict[str, Any], row: dict[str, Any], where: str) -> float:
    delay_s = seconds_of(row, "delay", where, unit_s=_MS)
    if delay_s is not None:
        return max(delay_s, 0.0)
    start_s, before_s = (seconds_of(item, "timestamp", where, unit_s=_MS) for item in (row, previous))
    return max(start_s - before_s, 0.0) if start_s is not None and before_s is not None else 0.0


def _arrival_s(rows: list[Row]) -> float:
    where, row = rows[0]
    return seconds_of(row, "timestamp", where, unit_s=_MS) or 0.0
