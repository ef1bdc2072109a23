"""Formats that record the token counts of requests: Azure, BurstGPT, Mooncake, Bailian, Dynamo, AIPerf, server logs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from workloads.formats.chat import prompt_of
from workloads.formats.loader import (
    Row,
    Rows,
    as_object,
    count_of,
    file_stem,
    first_of,
    number_of,
    parsed,
    part_of,
    seconds_of,
    text_of,
    time_s,
)
from workloads.formats.rounds import Request, common_prefix

_MS = 1e-3

# -- Azure and BurstGPT: tables of requests with real arrivals


def read_azure(rows: Rows) -> Iterator[Request]:
    """`TIMESTAMP,ContextTokens,GeneratedTokens`: every row is a session of one round."""
    return _table(rows, ("TIMESTAMP",), "ContextTokens", "GeneratedTokens")


def read_burstgpt(rows: Rows) -> Iterator[Request]:
    """`Timestamp` in seconds; newer files have a `Session ID`, and how long a request took as `Elapsed time`."""
    return _table(rows, ("Timestamp",), "Request tokens", "Response tokens")


def _table(rows: Rows, times: tuple[str, ...], prompt: str, output: str) -> Iterator[Request]:
    for row in rows:
        data, where = row.data, row.where
        start_s = time_s(data, *times, where=where)
        took_s = seconds_of(data, "Elapsed time", where=where)
        yield Request(
            where,
            session=text_of(data, "Session ID") or f"{file_stem(row.name)}-{where.rpartition(':')[2].strip()}",
            start_s=start_s,
            end_s=None if start_s is None or took_s is None else start_s + took_s,
            prompt_tokens=count_of(data, prompt, where=where) or 0,
            output_tokens=count_of(data, output, where=where) or 0,
        )


# -- Mooncake traces, also with sessions and dependencies as Dynamo's replay and AIPerf read them

_BLOCK_TOKENS = 512
_BLOCKS_TOKENS = (_BLOCK_TOKENS, 16, 32, 64, 128, 256, 1024, 2048)
_LENGTHS = ("input_length", "input_tokens", "prompt_length")
_OUTPUTS = ("output_length", "output_tokens", "max_tokens")


def read_mooncake(rows: Rows) -> Iterator[Request]:
    """Whole prompts: the hashes of their blocks show how much of the previous prompt a round keeps."""
    requests = list(_mooncake(rows))
    later, rewrites = _rewrites(requests)
    if 2 * rewrites > later:
        rows.note(
            f"{rewrites} of {later} later rounds are shorter than the prompt and the answer before them, and "
            "keep no block of it; if each row holds only what a round adds, convert it as mooncake-delta"
        )
    return iter(requests)


def are_deltas(rows: Iterable[Row]) -> bool:
    """Whether most later rows of sessions look like increments."""
    later, rewrites = _rewrites(_mooncake(Rows(rows, lambda _: None)))
    return 2 * rewrites > later


def _rewrites(requests: Iterable[Request]) -> tuple[int, int]:
    """How many rounds are no first ones, and how many of these keep nothing of the context before."""
    before: dict[str | None, Request] = {}
    later = rewrites = 0
    for request in requests:
        if (previous := before.get(request.session)) is not None:
            later += 1
            context = (previous.prompt_tokens or 0) + (previous.output_tokens or 0)
            shorter = request.prompt_tokens is None or request.prompt_tokens < context
            begins = common_prefix(previous.hashes, request.hashes) or common_prefix(
                previous.messages, request.messages
            )
            rewrites += shorter and not begins
        before[request.session] = request
    return later, rewrites


def read_delta(rows: Rows) -> Iterator[Request]:
    """The prompt of a session's later rows is only what the round adds; nothing is ever rewritten.

    Only a session's first row tells what it shares with others.
    """
    seen: set[str] = set()
    for request in _mooncake(rows):
        if request.session in seen:
            request.increment, request.hashes = True, ()
        seen.add(str(request.session))
        yield request


def read_agentic(rows: Rows) -> Iterator[Request]:
    """The gap before a round is `delay` plus `tool_wait_ms`.

    A row's wait for another session (a sub-agent) is no dependency: that session starts at its own recorded time.
    """
    return _mooncake(rows, agentic=True)


def _mooncake(rows: Rows, *, agentic: bool = False) -> Iterator[Request]:
    ordered = _in_time_order(rows)
    block_tokens = _block_tokens(ordered, rows.note)
    names = ("session_id", "request_id") if agentic else ("session_id",)
    for row in ordered:
        data, where = row.data, row.where
        hashes = _hashes(row)
        prompt = prompt_of(data) or prompt_of({"prompt": first_of(data, "text_input", "input_text", "text")})
        tokens = count_of(data, *_LENGTHS, where=where)
        if tokens is None and not prompt:
            if not hashes:
                raise UserError(f"{where}: there is no input_length, and neither hash_ids nor text to count it from")
            tokens = len(hashes) * block_tokens
        gap_s = seconds_of(data, "delay", where=where, unit_s=_MS)
        if agentic:
            gap_s = (gap_s or 0.0) + (seconds_of(data, "tool_wait_ms", where=where, unit_s=_MS) or 0.0)
        yield Request(
            where,
            session=text_of(data, *names) or Path(where).name,
            start_s=seconds_of(data, "timestamp", where=where, unit_s=_MS),
            gap_s=gap_s,
            prompt_tokens=tokens,
            output_tokens=count_of(data, *_OUTPUTS, where=where),
            messages=prompt.messages if prompt else (),
            system_messages=prompt.system_messages if prompt else 0,
            hashes=hashes,
            block_tokens=block_tokens,
            rewritten=bool(data.get("prefix_reset")),
        )


def _in_time_order(rows: Iterable[Row]) -> list[Row]:
    """By `timestamp` if all rows have one, because logs are also written newest first."""
    rows = list(rows)
    times = [number_of(row.data, "timestamp", where=row.where) for row in rows]
    known = [at for at in times if at is not None]
    if len(known) < len(rows):
        return rows
    return [rows[index] for index in sorted(range(len(rows)), key=known.__getitem__)]


def _hashes(row: Row) -> Sequence[int | str]:
    """The hashes of a row's blocks; empty if it has none that can be compared."""
    hashes = parsed(first_of(row.data, "hash_ids", "hashes"))
    return hashes if isinstance(hashes, list) and hashes and isinstance(hashes[0], int | str) else ()


def _block_tokens(rows: Sequence[Row], note: Callable[[str], None]) -> int:
    """How many tokens a hash stands for, by the lengths of the prompts: 512, unless these tell otherwise."""
    lengths = ((count_of(row.data, *_LENGTHS, where=row.where), len(_hashes(row))) for row in rows)
    pairs = [(tokens, hashes) for tokens, hashes in lengths if tokens and hashes]
    if not pairs:
        return _BLOCK_TOKENS
    fits = {
        size: sum(hashes in (-(-tokens // size), tokens // size) for tokens, hashes in pairs) for size in _BLOCKS_TOKENS
    }
    best = max(fits, key=lambda size: fits[size])
    if 2 * fits[best] < len(pairs):  # no usual size: the one that all lengths allow
        least = max(-(-tokens // hashes) for tokens, hashes in pairs)
        most = min(((tokens - 1) // (hashes - 1) for tokens, hashes in pairs if hashes > 1), default=0)
        if least > most:
            misfits = f"{len(pairs) - fits[_BLOCK_TOKENS]} of {len(pairs)}"
            note(f"hash_ids fit no size of blocks in {misfits} rows; {_BLOCK_TOKENS} tokens are assumed")
            return _BLOCK_TOKENS
        best = least
    elif 2 * fits[_BLOCK_TOKENS] >= fits[best]:
        best = _BLOCK_TOKENS
    if best != _BLOCK_TOKENS:
        note(f"the blocks of hash_ids have {best} tokens, by the lengths of the prompts")
    return best


# -- Bailian: requests of chats that name their parent; a second answer to the same chat is a branch of its own


_BAILIAN_BLOCK_TOKENS = 16


def read_bailian(rows: Rows) -> Iterator[Request]:
    """`{chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn, hash_ids}`, blocks of 16."""
    sessions: dict[str, str] = {}
    for row in _in_time_order(rows):
        data, where = row.data, row.where
        chat = str(data.get("chat_id"))
        sessions[chat] = sessions.pop(str(data.get("parent_chat_id")), chat)
        yield Request(
            where,
            session=sessions[chat],
            start_s=seconds_of(data, "timestamp", where=where),
            prompt_tokens=count_of(data, *_LENGTHS, where=where) or 0,
            output_tokens=count_of(data, *_OUTPUTS, where=where) or 0,
            hashes=_hashes(row),
            block_tokens=_BAILIAN_BLOCK_TOKENS,
        )


# -- Dynamo's own request traces (`DYN_REQUEST_TRACE=1`, schema dynamo.request.trace.v1)


def read_dynamo(rows: Rows) -> Iterator[Request]:
    """`request_end` records. Requests of one session that ran at the same time follow each other without a gap."""
    for row in rows:
        where = row.where
        event = as_object(row.data.get("event", row.data), where)
        if event.get("event_type") != "request_end":
            continue
        request = as_object(event.get("request"), f"{where}: request")
        end_s = seconds_of(event, "event_time_unix_ms", where=where, unit_s=_MS)
        start_s = seconds_of(request, "request_received_ms", where=where, unit_s=_MS)
        total_s = seconds_of(request, "total_time_ms", where=where, unit_s=_MS)
        if start_s is None and end_s is not None:
            start_s = end_s - (total_s or 0.0)
        if start_s is not None and total_s is not None:
            end_s = start_s + total_s
        replay = request.get("replay") or {}
        yield Request(
            where,
            session=text_of(event.get("agent_context") or {}, "session_id") or text_of(request, "request_id") or where,
            start_s=start_s,
            end_s=end_s,
            prompt_tokens=count_of(request, "input_tokens", where=where) or 0,
            output_tokens=count_of(request, "output_tokens", where=where) or 0,
            cached_tokens=count_of(request, "cached_tokens", where=where),
            hashes=replay.get("input_sequence_hashes") or (),
            block_tokens=count_of(replay, "trace_block_size", where=where) or 0,
        )


# -- AIPerf's `profile_export.jsonl`: one record per request of a benchmark


def read_aiperf(rows: Rows) -> Iterator[Request]:
    """The server's own counts, if AIPerf recorded them, go before AIPerf's. Requests of the warm-up are left out."""
    for row in rows:
        where = row.where
        metadata, metrics = (as_object(row.data.get(key) or {}, where) for key in ("metadata", "metrics"))
        if metadata.get("benchmark_phase") == "warmup":
            rows.leave_out("requests of the warm-up", where)
            continue
        counts = {key: metric.get("value") if isinstance(metric, dict) else metric for key, metric in metrics.items()}
        yield Request(
            where,
            session=text_of(metadata, "x_correlation_id", "conversation_id", "session_num"),
            start_s=time_s(metadata, "request_start_ns", where=where),
            end_s=time_s(metadata, "request_end_ns", where=where),
            prompt_tokens=count_of(counts, "usage_prompt_tokens", "input_sequence_length", where=where) or 0,
            output_tokens=count_of(counts, "usage_completion_tokens", "output_sequence_length", where=where) or 0,
        )


# -- request logs of vLLM and SGLang: as lines of text, or (SGLang) as JSON

_LOG_TIME = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_QUOTED = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_VLLM = re.compile(r"(Received request|Generated response|Request) ([^\s:]+)(?: details)?(?: \(streaming complete\))?:")
_TEMPLATE = re.compile(
    r"(?=<\|(?:im_start|start_header_id|start|user|assistant|system|turn)\|>|<start_of_turn>|<\uff5cUser\uff5c>)"
)
"""Where chat templates begin a message, so that prompts of one conversation begin with the same ones."""
_TEMPLATE_END = re.compile(r"(?:<\|(?:im_end|eot_id|end|return)\|>|<end_of_turn>|</s>|\s)+$")


def read_vllm(rows: Rows) -> Iterator[Request]:
    """`Received request` lines, and `Generated response` lines with `--enable-log-outputs`."""
    requests: dict[str, Request] = {}
    for row in rows:
        line = str(row.data.get("log"))
        if not (match := _VLLM.search(line)):
            continue
        what, name, rest = match[1], match[2], line[match.end() :]
        at_s = _logged_s(line[: match.start()], row.where)
        request = requests.setdefault(name, Request(row.where, start_s=at_s))
        if what == "Generated response":
            request.end_s = at_s
            request.output_tokens = _listed(rest, "output_token_ids")
            _put_answer(request, _quoted(rest, "output: "))
            continue
        request.prompt_tokens = _listed(rest, "prompt_token_ids") or request.prompt_tokens
        request.messages = _template_parts(_quoted(rest, "prompt: ")) or request.messages
    unread = [request for request in requests.values() if not request.messages and not request.prompt_tokens]
    if unread:
        rows.note(
            f"{len(unread)} requests are logged without their prompt; vLLM logs it with VLLM_LOGGING_LEVEL=DEBUG, "
            "--enable-log-requests and no --max-log-len"
        )
    return iter(requests.values())


def read_sglang(rows: Rows) -> Iterator[Request]:
    """The lines of finished requests (`--log-requests`), with the counts of their `meta_info`."""
    for row in rows:
        if (request := _sglang_json(row) or _sglang_text(row)) is not None:
            yield request


def _sglang_json(row: Row) -> Request | None:
    data = row.data
    line = str(data.get("log") or "")
    if line and '{"' in line and '"request.finished"' in line:
        try:
            data = json.loads(line[line.index("{") :])
        except ValueError:
            raise UserError(f"{row.where}: not JSON (a request.finished line is cut)") from None
    if data.get("event") != "request.finished":
        return None
    out = as_object(data.get("out"), f"{row.where}: out")
    obj = part_of(data, "obj")
    meta = as_object(out.get("meta_info"), f"{row.where}: meta_info")
    end_s = time_s(data, "timestamp", where=row.where)
    return _finished(row.where, meta, end_s, obj.get("text"), out.get("text"), obj.get("session_params"))


def _sglang_text(row: Row) -> Request | None:
    line = str(row.data.get("log"))
    head, found, rest = line.partition("Finish: obj=")
    obj, split, out = rest.rpartition("out={")
    if not found or not split:
        return None
    meta: dict[str, Any] = {
        key: float(values[-1])
        for key in ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency")
        if (values := re.findall(rf"'{key}': ([\d.]+)", out))
    }
    return _finished(row.where, meta, _logged_s(head, row.where), _quoted(obj, "text="), _quoted(out, "'text': "), None)


def _finished(where: str, meta: dict[str, Any], end_s: float | None, prompt: Any, answer: Any, session: Any) -> Request:
    took_s = seconds_of(meta, "e2e_latency", where=where)
    request = Request(
        where,
        session=text_of(session, "id") if isinstance(session, dict) else None,
        start_s=None if end_s is None else end_s - (took_s or 0.0),
        end_s=end_s,
        prompt_tokens=count_of(meta, "prompt_tokens", where=where),
        output_tokens=count_of(meta, "completion_tokens", where=where),
        cached_tokens=count_of(meta, "cached_tokens", where=where),
        messages=_template_parts(prompt if isinstance(prompt, str) else None),
    )
    _put_answer(request, answer if isinstance(answer, str) else None)
    return request


def _template_parts(prompt: str | None) -> tuple[str, ...]:
    return tuple(_TEMPLATE_END.sub("", part) for part in _TEMPLATE.split(prompt) if part) if prompt else ()


def _put_answer(request: Request, answer: str | None) -> None:
    """The template's header of the answer is the last part of the prompt; later prompts have both as one message."""
    if answer is None:
        return
    request.answer = _TEMPLATE_END.sub("", answer)
    if len(request.messages) > 1:
        *messages, header = request.messages
        request.messages, request.answer = tuple(messages), f"{header}\n{request.answer}"


def _logged_s(text: str, where: str) -> float | None:
    """The time of a log's line; vLLM's have no year, and only differences count."""
    if not (match := _LOG_TIME.search(text)):
        return None
    year, month, day, clock = match.groups()
    return time_s({"time": f"{year or 2000}-{month}-{day}T{clock}"}, "time", where=where)


def _listed(text: str, key: str) -> int | None:
    """How many ids a list in a log has."""
    match = re.search(rf"{key}: [^\[\],]*\[([^\]]*)\]", text)
    return match[1].count(",") + 1 if match and match[1].strip() else None


def _quoted(text: str, before: str) -> str | None:
    match = re.search(re.escape(before) + _QUOTED, text)
    # A null byte, which no log writes, has no place in a literal.
    return str(ast.literal_eval(match[1].replace("\0", ""))) if match else None
