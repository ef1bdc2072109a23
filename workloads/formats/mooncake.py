"""Mooncake traces, also with sessions and dependencies as Dynamo's replay reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from workloads.formats.chain import Call, common_prefix, rounds_of
from workloads.formats.loader import LoadOptions, register
from workloads.formats.source import Row, count_of, rows_by_session, seconds_of, source_files
from workloads.trace import Round, Session, SharedPrefix

BLOCK_TOKENS = 512
Block = int | str
"""The hash of a block."""

_MS = 1e-3
_COUNTS = ("input_length", "output_length")


@register("mooncake", "Mooncake JSONL with whole prompts; rows of one session_id are its rounds, others stand alone")
def load(path: Path, options: LoadOptions) -> Iterator[Session]:
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


@register("mooncake-delta", "Mooncake JSONL whose later rows hold only what a round adds (Dynamo's delta variant)")
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


@register("agentic-mooncake", "Dynamo's agentic Mooncake JSONL (wait_for, delay, tool_wait_ms)")
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
