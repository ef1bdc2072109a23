"""`ampd trace`: convert, generate and describe traces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.errors import UserError
from ampd.settings import Settings, parse_settings
from workloads.formats import LoadOptions, formats, load_sessions
from workloads.generate import WORKLOADS, Lengths, generate
from workloads.stats import format_stats, trace_stats
from workloads.tokencount import load_counter
from workloads.trace import Session, shipped_traces, stream_trace, write_trace


class ConvertSettings(Settings):
    """Convert a trace of another format (`ampd trace formats` lists them) to ours."""

    known_names: ClassVar = {"format": formats}

    format: CliPositionalArg[str] = Field(description="Name of the source format.")
    source: CliPositionalArg[Path] = Field(description="File or folder to read; .gz is unpacked.")
    output: CliPositionalArg[Path] = Field(description="Trace file to write (.jsonl or .jsonl.gz).")
    tokenizer: Path | None = Field(
        None,
        description="tokenizer.json, model folder or tiktoken-style ranks file for sources that hold words; "
        "default: an approximation.",
    )
    text: bool = Field(False, description="Keep the words of every increment, for replays with real words.")


class GenerateSettings(Settings):
    """Generate synthetic sessions with the means of the AMPD paper's workloads."""

    workload: CliPositionalArg[str] = Field(description=f"One of {', '.join(WORKLOADS)}.")
    sessions: int = Field(100, ge=1, description="How many sessions.")
    rate: float = Field(1.0, gt=0, description="Session arrivals per second (Poisson).")
    seed: int = Field(0, description="The same seed gives the same trace.")
    lengths: Lengths = Field(
        Lengths.PER_SESSION, description="Whether the paper's token counts are totals of a session or means of a round."
    )
    tool_s: float | None = Field(
        None, ge=0, description="Mean tool time in seconds; default: an assumption for each workload (docs/traces.md)."
    )
    output: Path = Field(description="Trace file to write (.jsonl or .jsonl.gz).")


class StatsSettings(Settings):
    """Describe a trace: sessions, rounds, tokens, gaps, rewrites and percentiles."""

    known_names: ClassVar = {"trace": shipped_traces}

    trace: CliPositionalArg[str] = Field(description="Trace file, or the name of a shipped trace.")
    as_json: bool = Field(False, validation_alias="json", description="Print one JSON object instead of the table.")


def run(argv: Sequence[str]) -> int:
    """Run one of the sub-commands.

    Raises:
        UserError: an unknown sub-command, a wrong flag, or input that does not fit.
    """
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "convert": _convert,
        "generate": _generate,
        "stats": _stats,
        "formats": _formats,
        "list": _list,
    }
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if not argv or argv[0] not in commands:
        given = f"unknown sub-command {argv[0]!r}" if argv else "a sub-command is missing"
        raise UserError(f"ampd trace: {given}; known: {', '.join(commands)}")
    commands[argv[0]](argv[1:])
    return 0


_HELP = """usage: ampd trace COMMAND ...

  convert FORMAT IN OUT   convert a trace of another format
  generate WORKLOAD       generate synthetic sessions of a workload of the paper
  stats TRACE             describe a trace
  formats                 list the formats that convert reads
  list                    list the shipped traces

ampd trace COMMAND --help explains one."""


def _convert(argv: Sequence[str]) -> None:
    settings = parse_settings(ConvertSettings, argv, "ampd trace convert")
    options = LoadOptions(count_tokens=load_counter(settings.tokenizer), with_text=settings.text)
    sessions = load_sessions(settings.format, settings.source, options)
    count = write_trace(_unique(sessions), settings.output)
    if not count:
        settings.output.unlink()
        raise UserError(f"{settings.source}: holds no session of the format {settings.format}")
    print(f"{settings.output}: {count} sessions", file=sys.stderr)


def _unique(sessions: Iterator[Session]) -> Iterator[Session]:
    """Name sessions apart that their source names alike."""
    seen: dict[str, int] = {}
    for session in sessions:
        seen[session.session_id] = times = seen.get(session.session_id, 0) + 1
        if times == 1:
            yield session
        else:
            yield session.model_copy(update={"session_id": f"{session.session_id}~{times}"})


def _generate(argv: Sequence[str]) -> None:
    settings = parse_settings(GenerateSettings, argv, "ampd trace generate")
    if settings.workload not in WORKLOADS:
        raise UserError(f"ampd trace generate: unknown workload {settings.workload!r}; known: {', '.join(WORKLOADS)}")
    sessions = generate(
        settings.workload, settings.sessions, settings.rate, settings.seed, settings.lengths, settings.tool_s
    )
    count = write_trace(sessions, settings.output)
    print(f"{settings.output}: {count} sessions", file=sys.stderr)


def _stats(argv: Sequence[str]) -> None:
    settings = parse_settings(StatsSettings, argv, "ampd trace stats")
    stats = trace_stats(stream_trace(settings.trace))
    print(json.dumps(stats, indent=2) if settings.as_json else format_stats(stats))


def _formats(argv: Sequence[str]) -> None:
    del argv
    for name, known in formats().items():
        print(f"{name:18} {known.summary}")


def _list(argv: Sequence[str]) -> None:
    del argv
    for name in shipped_traces():
        print(name)
