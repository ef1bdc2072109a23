"""Loaders: from the trace formats of the field to ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from ampd.documents import first_problem
from ampd.errors import UserError, one_line_of
from workloads.formats.agents import load_kv_cache_tester, load_tracelab, load_trail
from workloads.formats.chat import load_openai, load_tau_bench, load_toolbench
from workloads.formats.loader import Loader, LoadOptions
from workloads.formats.requests import load_agentic, load_azure, load_delta, load_dynamo, load_mooncake
from workloads.trace import Session

__all__ = ["FORMATS", "LoadOptions", "load_sessions"]

FORMATS: dict[str, tuple[str, Loader]] = {
    "agentic-mooncake": ("Dynamo's agentic Mooncake JSONL (wait_for, delay, tool_wait_ms)", load_agentic),
    "azure": ("Azure LLM 2023/2024 CSV (single requests; real arrivals)", load_azure),
    "dynamo": ("Dynamo request traces (request_end records; sessions by agent_context)", load_dynamo),
    "kv-cache-tester": (
        "kv-cache-tester traces (coding agents; real gaps; arrivals 0: each file starts at its own 0)",
        load_kv_cache_tester,
    ),
    "mooncake": (
        "Mooncake JSONL with whole prompts; rows of one session_id are its rounds, others stand alone",
        load_mooncake,
    ),
    "mooncake-delta": (
        "Mooncake JSONL whose later rows hold only what a round adds (Dynamo's delta variant)",
        load_delta,
    ),
    "openai-messages": ("OpenAI messages as JSON lines (conversations, or requests)", load_openai),
    "tau-bench": ("tau-bench trajectories (messages; no times: every gap and arrival is 0)", load_tau_bench),
    "toolbench": ("ToolBench answer files (messages; no times: every gap and arrival is 0)", load_toolbench),
    "tracelab": ("TraceLab round tables (round_trace.jsonl; recorded tool and user times)", load_tracelab),
    "trail": ("TRAIL / OpenInference spans (LLM and TOOL spans, recorded times)", load_trail),
}
"""Name -> one line about the format, and its loader."""

_MISFITS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What a loader raises where a value has another form than the format says."""


def load_sessions(name: str, path: Path, options: LoadOptions) -> Iterator[Session]:
    """Load `path` as the format `name` (underscores and hyphens are the same).

    Raises:
        UserError: an unknown format (the known ones are listed), a missing path, or input that does not fit.
    """
    known = name.lower().replace("_", "-")
    if known not in FORMATS:
        raise UserError(f"unknown trace format {name!r}; known: {', '.join(FORMATS)}")
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    return _loaded(known, FORMATS[known][1], path, options)


def _loaded(name: str, load: Loader, path: Path, options: LoadOptions) -> Iterator[Session]:
    try:
        yield from load(path, options)
    except ValidationError as error:
        raise UserError(f"{path}: does not fit the format {name}: {first_problem(error)}") from None
    except _MISFITS as error:
        raise UserError(f"{path}: does not fit the format {name}: {one_line_of(error)}") from None
