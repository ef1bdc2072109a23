"""Converters: from the trace formats of the field to ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from ampd.documents import first_problem
from ampd.errors import UserError, did_you_mean, one_line_of
from workloads.formats import agents, chat, requests, telemetry
from workloads.formats.loader import Row, Rows, has, rows_of, source_files
from workloads.formats.rounds import LoadOptions, Reader, sessions_of
from workloads.trace import Session

__all__ = ["FORMATS", "Format", "LoadOptions", "detect", "load_sessions"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is recognised and read.

    Attributes:
        summary: what writes it.
        signs: alternatives between bars, as `loader.has` reads them. The first format of the table that has one counts.
        one_file: each file has times or names of its own, so a folder may hold one.
    """

    summary: str
    signs: str
    read: Reader
    one_file: bool = False

    @property
    def alternatives(self) -> list[str]:
        return self.signs.split(" | ") if self.signs else []


FORMATS: dict[str, Format] = {
    "claude-code": Format(
        "session files of Claude Code (~/.claude/projects)",
        "sessionId, message/usage | sessionId, parentUuid, message/role | session_id, message/usage",
        agents.read_claude_code,
    ),
    "codex": Format(
        "session files of Codex (~/.codex/sessions)",
        "type=session_meta | type=response_item, payload | type=event_msg, payload | record_type=state",
        agents.read_codex,
    ),
    "otel": Format(
        "OpenTelemetry gen_ai and OpenInference spans: OTLP, Jaeger, flat or nested (TRAIL)",
        "resourceSpans | resource_spans | batches | spans | span_attributes | attributes/gen_ai*"
        " | attributes/llm* | attributes/openinference* | attributes/key=gen_ai.* | attributes.gen_ai.*"
        " | attributes.llm.* | tags/key=gen_ai.*",
        telemetry.read_otel,
    ),
    "langfuse": Format(
        "observations or traces of Langfuse",
        "type=GENERATION | observations | traces/observations | traceId, usageDetails | trace_id, usage_details",
        telemetry.read_langfuse,
    ),
    "litellm": Format(
        "spend logs or callback payloads of LiteLLM",
        "call_type, startTime | spend, startTime, prompt_tokens",
        telemetry.read_litellm,
    ),
    "azure": Format(
        "Azure LLM traces (single requests)",
        "ContextTokens, GeneratedTokens",
        requests.read_azure,
        one_file=True,
    ),
    "burstgpt": Format(
        "BurstGPT",
        "Request tokens, Response tokens",
        requests.read_burstgpt,
        one_file=True,
    ),
    "bailian": Format(
        "Bailian chains of requests",
        "chat_id, parent_chat_id",
        requests.read_bailian,
        one_file=True,
    ),
    "swe-agent": Format(
        "SWE-agent's .traj and mini-swe-agent's trajectories",
        "trajectory_format | trajectory/response | trajectory, history | trajectory/role | info/model_stats, messages",
        agents.read_swe_agent,
    ),
    "openhands": Format(
        "events of OpenHands",
        "history/action | history/source | history/kind | action, source | observation, source"
        " | kind=*Event, source | tool_call_metadata",
        agents.read_openhands,
    ),
    "sharegpt": Format(
        "ShareGPT conversations",
        "conversations/from | conversation/from | conversation/role | items/from",
        chat.read_sharegpt,
    ),
    "aiperf": Format(
        "AIPerf's profile_export.jsonl",
        "metadata/request_start_ns | metrics/input_sequence_length",
        requests.read_aiperf,
    ),
    "vllm": Format(
        "request log of vLLM",
        "log=*Received request * | log=*Generated response *",
        requests.read_vllm,
    ),
    "sglang": Format(
        "request log of SGLang (text or JSON)",
        'log=*Finish: obj=* | log=*"event": "request.* | event=request.finished | event=request.received*',
        requests.read_sglang,
    ),
    "dynamo": Format(
        "Dynamo's request traces",
        "event/event_type | event_type=request_end",
        requests.read_dynamo,
    ),
    "agentic-mooncake": Format(
        "Dynamo's agentic Mooncake rows",
        "input_length, wait_for | input_length, tool_wait_ms | input_length, prefix_reset",
        requests.read_agentic,
    ),
    "kv-cache-tester": Format(
        "traces of kv-cache-tester",
        "requests/in | requests/requests/in | block_size, requests",
        agents.read_kv_cache_tester,
    ),
    "tracelab": Format(
        "TraceLab's round_trace.jsonl",
        "input_tokens_total, round_index",
        agents.read_tracelab,
        one_file=True,
    ),
    "tau-bench": Format(
        "tau-bench trajectories",
        "traj/role | traj, task_id",
        chat.read_tau_bench,
    ),
    "toolbench": Format(
        "ToolBench answer files",
        "answer_generation",
        chat.read_toolbench,
    ),
    "mooncake-delta": Format(
        "Mooncake rows that hold only what a round adds",
        "",
        requests.read_delta,
    ),
    "mooncake": Format(
        "Mooncake rows: whole prompts, with lengths, hashes or text",
        "input_length, output_length | hash_ids | input_length, timestamp | text_input | input_text"
        " | timestamp, messages, output_length | delay, messages, output_length",
        requests.read_mooncake,
    ),
    "openai-messages": Format(
        "message logs in the forms of OpenAI and Anthropic: conversations, or requests",
        "messages | request/messages | request/input | request_body | body/messages | input, output"
        " | role, content | request, response | prompt, response | prompt, completion"
        " | response/body/usage | response/usage | usage/prompt_tokens",
        chat.read_openai,
    ),
}
"""Name -> format. The order is that of recognition: what few formats have comes first."""

_ALIASES = {"trail": "otel", "openinference": "otel", "opentelemetry": "otel"}
_LOOKED_AT = 2000
"""Rows of a file in which a sign is sought: session files begin with other lines, and logs with a server's start."""
_FILES_LOOKED_AT = 20

_MISFITS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What a reader raises where a value has another form than the format says."""


def detect(path: Path) -> tuple[str, str]:
    """The format of a file or of the files of a folder, and the sign that tells it.

    Raises:
        UserError: no format has such rows, or the path is missing.
    """
    seen: Row | None = None
    for file in _existing(path)[:_FILES_LOOKED_AT]:
        try:
            rows = list(islice(rows_of(file, path), _LOOKED_AT))
        except UserError:
            if path.is_dir():  # it may hold other files too
                continue
            raise
        seen = seen or next(iter(rows), None)
        if found := _recognised(rows):
            return found
    if seen is None:
        raise UserError(f"{path}: holds no row")
    if "rounds" in seen.data and "arrival_s" in seen.data:
        raise UserError(f"{seen.where}: this is a trace of AMPD already; it needs no conversion")
    keys = ", ".join(map(str, list(seen.data)[:8])) or "no keys"
    raise UserError(
        f"{seen.where}: no known format has such rows (keys: {keys}); ampd trace formats lists the known ones, "
        "and ampd trace convert FORMAT IN OUT names one"
    )


def _recognised(rows: list[Row]) -> tuple[str, str] | None:
    for name, known in FORMATS.items():
        if sign := next((sign for sign in known.alternatives if any(has(row.data, sign) for row in rows)), None):
            if name == "mooncake" and requests.are_deltas(rows):
                return "mooncake-delta", "rows of a session are shorter than what is before them, and repeat no hash"
            return name, f"its rows have {sign}"
    return None


def load_sessions(name: str, path: Path, options: LoadOptions) -> Iterator[Session]:
    """Load `path` as the format `name` (underscores and hyphens are the same).

    Raises:
        UserError: an unknown format (the known ones are listed), a missing path, or input that does not fit.
    """
    known = format_name(name)
    if known is None:
        raise UserError(
            f"unknown trace format {name!r}; known: {', '.join(sorted(FORMATS))}{did_you_mean(name, FORMATS)}"
        )
    return _loaded(known, path, _existing(path), options)


def format_name(name: str) -> str | None:
    """The name of a format as `FORMATS` has it; None: there is none."""
    known = name.lower().replace("_", "-")
    known = _ALIASES.get(known, known)
    return known if known in FORMATS else None


def _existing(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    return source_files(path)


def _loaded(name: str, path: Path, files: list[Path], options: LoadOptions) -> Iterator[Session]:
    last: list[str] = [str(path)]
    rows = Rows(_rows(name, path, files, options, last), lambda message: options.note(f"{path}: {message}"))
    try:
        yield from sessions_of(FORMATS[name].read(rows), path, options)
        for why, places in rows.left.items():
            rows.note(f"{len(places)} left out, {why} (the first: {places[0]})")
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{last[0]}: {error}") from None
    except ValidationError as error:
        raise UserError(f"{last[0]}: does not fit the format {name}: {first_problem(error)}") from None
    except _MISFITS as error:
        raise UserError(f"{last[0]}: does not fit the format {name}: {one_line_of(error)}") from None


def _rows(name: str, path: Path, files: list[Path], options: LoadOptions, last: list[str]) -> Iterator[Row]:
    """The rows of the files; of a folder, those whose rows have a sign of the format."""
    taken: list[Path] = []
    for file in files:
        if not (why_not := _misfit(name, file, path)):
            taken.append(file)
        elif path.is_dir():
            options.note(f"{why_not}, left out")
        else:
            raise UserError(why_not)
    if FORMATS[name].one_file and len(taken) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in taken[:5])
        raise UserError(f"{path}: holds {len(taken)} traces; convert one at a time: {names}")
    for file in taken:
        for row in rows_of(file, path):
            last[0] = row.where
            yield row


def _misfit(name: str, file: Path, path: Path) -> str | None:
    """Why a file of a folder is no part of the trace; None: it is one."""
    signs = FORMATS["mooncake" if name == "mooncake-delta" else name].alternatives
    try:
        rows = list(islice(rows_of(file, path), _LOOKED_AT))
    except UserError as error:
        return str(error)
    if not rows or any(has(row.data, sign) for row in rows for sign in signs):
        return None
    other, _ = _recognised(rows) or ("", "")
    hint = f"; it looks like {other}" if other else ""
    return f"{rows[0].where}: no row has what {name} has ({' or '.join(signs[:4])}){hint}"
