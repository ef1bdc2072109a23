"""Formats of recorded requests with token counts: Azure, Dynamo, Mooncake."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.loader import (
    Call,
    LoadOptions,
    Row,
    as_object,
    common_prefix,
    count_of,
    file_stem,
    only_file,
    read_json_lines,
    rounds_of,
    rows_by_session,
    seconds_of,
    source_files,
    timestamp_s,
)
from workloads.trace import MAX_TOKENS, Round, Session, SharedPrefix, open_text

# -- Azure LLM inference traces: single requests (CSV `TIMESTAMP,ContextTokens,GeneratedTokens`), real arrivals

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def load_azure(path: Path, options: LoadOptions) -> Iterator[Session]:
    """Every row is a session of one round; arrivals count from the first row. Several files are several traces."""
    file = only_file(path, ".csv")
    with open_text(file) as stream:
        reader = csv.DictReader(stream)
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise UserError(f"{file}:1: column {missing[0]} is missing")
        yield from _rows(reader, file, options)


def _rows(reader: csv.DictReader[str], file: Path, options: LoadOptions) -> Iterator[Session]:
    origin_s: float | None = None
    left_out = 0
    for number, row in enumerate(reader, start=2):
        where = f"{file}:{number}"
        # Azure writes seven decimals, Python reads six.
        start_s = timestamp_s(str(row["TIMESTAMP"])[:26], where)
        origin_s = start_s if origin_s is None else origin_s
        try:
            context_tokens, generated_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (TypeError, ValueError):
            raise UserError(f"{where}: token counts must be integers") from None
        if max(context_tokens, generated_tokens) > MAX_TOKENS:
            raise UserError(f"{where}: token counts must be at most {MAX_TOKENS}")
        if context_tokens < 1 or generated_tokens < 1:
            left_out += 1
            continue
        yield Session(
            session_id=f"{file_stem(file)}-{number}",
            arrival_s=round(max(start_s - origin_s, 0.0), 6),
            rounds=(Round(incr_tokens=context_tokens, output_tokens=generated_tokens),),
        )
    if left_out:
        options.note(f"{file}: {left_out} rows without tokens left out")


# -- Dynamo's own request traces (`DYN_REQUEST_TRACE=1`, schema dynamo.request.trace.v1)

_MS = 1e-3
_REQUEST_END = "request_end"


@dataclass(frozen=True, slots=True)
class _Request:
    where: str
    start_s: float
    end_s: float
    call: Call


def load_dynamo(path: Path, options: LoadOptions) -> Iterator[Session]:
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
        yield Session(
            session_id=name, arrival_s=arrival_s, rounds=rounds_of(_request_calls(requests), requests[0].where)
        )


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


def _request_calls(requests: list[_Request]) -> list[Call]:
    ends_s = [requests[0].start_s, *(item.end_s for item in requests)]
    return [replace(item.call, gap_s=item.start_s - end_s) for item, end_s in zip(requests, ends_s, strict=False)]


# -- Mooncake traces, also with sessions and dependencies as Dynamo's replay reads them

BLOCK_TOKENS = 512
Block = int | str
"""The hash of a block."""

_COUNTS = ("input_length", "output_length")


def load_mooncake(path: Path, options: LoadOptions) -> Iterator[Session]:
    """Whole prompts: `hash_ids` (one per 512 tokens) show how much of the previous prompt a round keeps.

    Sessions whose first prompts begin with the same block share the blocks that all of them begin with, as far as each
    prompt reaches.

    The gap before a round is its `delay`; without one, the difference of the two timestamps, which then includes the
    time that the original service took.
    """
    later = rewrites = 0
    by_session = _sessions(path, options)
    shared_blocks = _shared_blocks(by_session.values())
    for name, rows in by_session.items():
        calls = [_call(row, where, gap_s) for (where, row), gap_s in zip(rows, _gaps_s(rows), strict=True)]
        later += len(calls) - 1
        rewrites += sum(
            call.prompt_tokens < before.prompt_tokens + before.output_tokens
            and not common_prefix(before.hashes, call.hashes)
            for before, call in pairwise(calls)
        )
        yield Session(
            session_id=name,
            arrival_s=_start_s(rows[0]),
            rounds=rounds_of(calls, rows[0][0]),
            shared_prefix=_shared_prefix(rows[0], shared_blocks),
        )
    if 2 * rewrites > later:
        options.note(
            f"{path}: {rewrites} of {later} later rounds are shorter than the prompt and the answer before them, and "
            "keep no block of it; if each row holds only what a round adds, convert it as mooncake-delta"
        )


def load_delta(path: Path, options: LoadOptions) -> Iterator[Session]:
    """`input_length` of a session's later rows is the increment; nothing is ever rewritten.

    Sessions share blocks as in `mooncake`, because a session's first row holds its whole first prompt.
    """
    by_session = _sessions(path, options)
    shared_blocks = _shared_blocks(by_session.values())
    for name, rows in by_session.items():
        rounds = tuple(
            Round(
                incr_tokens=count_of(row, "input_length", where),
                output_tokens=count_of(row, "output_length", where),
                tool_s=gap_s,
            )
            for (where, row), gap_s in zip(rows, _gaps_s(rows), strict=True)
        )
        yield Session(
            session_id=name,
            arrival_s=_start_s(rows[0]),
            rounds=rounds,
            shared_prefix=_shared_prefix(rows[0], shared_blocks),
        )


def load_agentic(path: Path, options: LoadOptions) -> Iterator[Session]:
    """One session for each `session_id`, its rows in the order of their timestamps.

    The gap before a round is `delay` plus `tool_wait_ms`. A row's wait for ANOTHER session (a sub-agent) is
    no dependency in the trace: that session starts at its own recorded time.
    """

    def name_of(row: dict[str, Any], where: str) -> str:
        return str(row.get("session_id") or row.get("request_id") or where)

    by_session = rows_by_session(source_files(path, ".jsonl"), name_of, _COUNTS, options.note)
    for name, rows in by_session.items():
        rows.sort(key=_start_s)
        calls = []
        for where, row in rows:
            gap_s = sum(seconds_of(row, key, where, unit_s=_MS) or 0.0 for key in ("delay", "tool_wait_ms"))
            calls.append(_call(row, where, gap_s, shared_tokens=0 if row.get("prefix_reset") else None))
        yield Session(session_id=name, arrival_s=_start_s(rows[0]), rounds=rounds_of(calls, rows[0][0]))


def _shared_blocks(sessions: Iterable[Sequence[Row]]) -> dict[Block, Sequence[Block]]:
    """First block -> the blocks that all sessions with it begin with, if there are several."""
    first_rows: dict[Block, list[Row]] = {}
    for first_row, *_ in sessions:
        if blocks := _blocks(first_row):
            first_rows.setdefault(blocks[0], []).append(first_row)
    return {first: _common_blocks(rows) for first, rows in first_rows.items() if len(rows) > 1}


def _common_blocks(rows: Sequence[Row]) -> Sequence[Block]:
    """The blocks that two or more prompts with the same first block begin with.

    A prompt that ends within these blocks leaves them to the longer ones. Its last block may have another hash, because
    it is not full.
    """
    longest, second, *shorter = sorted(rows, key=_full_blocks, reverse=True)
    common = _blocks(longest)[: common_prefix(_blocks(longest), _blocks(second))]
    for row in shorter:
        equal = common_prefix(common, _blocks(row))
        if equal < _full_blocks(row):
            common = common[:equal]
    return common


def _shared_prefix(first_row: Row, shared_blocks: dict[Block, Sequence[Block]]) -> SharedPrefix | None:
    blocks = _blocks(first_row)
    shared = common_prefix(blocks, shared_blocks.get(blocks[0], ())) if blocks else 0
    if not shared:
        return None
    where, row = first_row
    tokens = min(shared * BLOCK_TOKENS, count_of(row, "input_length", where))
    return SharedPrefix(id=f"block-{blocks[0]}", tokens=tokens)


def _blocks(item: Row) -> Sequence[Block]:
    """The hashes of a row's blocks; empty if it has none that can be compared."""
    blocks = item[1].get("hash_ids")
    return blocks if isinstance(blocks, list) and blocks and isinstance(blocks[0], (int, str)) else ()


def _full_blocks(item: Row) -> int:
    where, row = item
    return min(len(_blocks(item)), count_of(row, "input_length", where) // BLOCK_TOKENS)


def _sessions(path: Path, options: LoadOptions) -> dict[str, list[Row]]:
    """The rows of each `session_id`; a row without one is a session that is named after its file and line."""

    def name_of(row: dict[str, Any], where: str) -> str:
        name = row.get("session_id")
        return Path(where).name if name is None else str(name)

    return rows_by_session(source_files(path, ".jsonl", ".json"), name_of, _COUNTS, options.note)


def _call(row: dict[str, Any], where: str, gap_s: float, shared_tokens: int | None = None) -> Call:
    return Call(
        prompt_tokens=count_of(row, "input_length", where),
        output_tokens=count_of(row, "output_length", where),
        gap_s=gap_s,
        hashes=row.get("hash_ids") or (),
        block_tokens=BLOCK_TOKENS,
        shared_tokens=shared_tokens,
    )


def _gaps_s(rows: list[Row]) -> list[float]:
    """The gap before each round; 0 before the first."""
    return [0.0, *(_gap_s(before, row) for before, row in pairwise(rows))]


def _gap_s(previous: Row, current: Row) -> float:
    where, row = current
    delay_s = seconds_of(row, "delay", where, unit_s=_MS)
    if delay_s is not None:
        return max(delay_s, 0.0)
    start_s, before_s = (seconds_of(item, "timestamp", where, unit_s=_MS) for item in (row, previous[1]))
    return max(start_s - before_s, 0.0) if start_s is not None and before_s is not None else 0.0


def _start_s(item: Row) -> float:
    where, row = item
    return seconds_of(row, "timestamp", where, unit_s=_MS) or 0.0
