"""`ampd trace`: converts, generates and describes traces."""

from __future__ import annotations

import json
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from ampd.errors import UserError, did_you_mean
from ampd.reports import counted
from ampd.settings import Settings, parse_settings, run_subcommand
from workloads.formats import FORMATS, LoadOptions, detect, format_name, load_sessions
from workloads.formats.loader import load_counter
from workloads.trace import Round, Session, poisson_arrivals, shipped_traces, stream_trace, write_trace

# -- statistics of a trace: sessions, rounds, tokens, gaps and rewrites, with percentiles

PERCENTILES = (50, 95, 99)
_DISTRIBUTIONS = (
    "rounds_per_session",
    "prefill_tokens_per_session",
    "output_tokens_per_session",
    "initial_tokens",
    "incremental_tokens",
    "output_tokens",
    "history_tokens",
    "max_context_tokens",
    "tool_s",
)


def trace_stats(sessions: Iterable[Session]) -> dict[str, Any]:
    """Counts and distributions of a trace; lengths in tokens, times in seconds.

    `prefill_tokens_per_session` counts increments only: the work of a system that loses no KV.
    `shared_tokens_total` is the part of them that sessions share with others, each session's counted.
    `tool_s` covers the rounds after the first. `rewrites` are rounds that kept less than the whole context.

    Args:
        sessions: at least one. They are not kept, only some 40 bytes per round.
    """
    totals: Counter[str] = Counter()
    arrivals, values = array("d"), {name: array("d") for name in _DISTRIBUTIONS}
    for session in sessions:
        arrivals.append(session.arrival_s)
        _count(session, totals)
        for name, numbers in _values(session).items():
            values[name].extend(numbers)
    span_s = max(arrivals) - min(arrivals)
    return {
        "sessions": len(arrivals),
        "rounds": totals["rounds"],
        "span_s": span_s,
        "rate": (len(arrivals) - 1) / span_s if span_s > 0 else None,
        "incr_tokens_total": totals["incr_tokens"],
        "output_tokens_total": totals["output_tokens"],
        "rewrites": totals["rewrites"],
        "rounds_with_text": totals["rounds_with_text"],
        "shared_tokens_total": totals["shared_tokens"],
        **{name: describe(numbers) for name, numbers in values.items()},
    }


def _count(session: Session, totals: Counter[str]) -> None:
    totals["rounds"] += len(session.rounds)
    totals["incr_tokens"] += sum(item.incr_tokens for item in session.rounds)
    totals["output_tokens"] += sum(item.output_tokens for item in session.rounds)
    totals["rewrites"] += _rewrites(session)
    totals["shared_tokens"] += session.shared_prefix.tokens if session.shared_prefix is not None else 0
    totals["rounds_with_text"] += sum(item.text is not None for item in session.rounds)


def _values(session: Session) -> dict[str, Iterable[float]]:
    """What one session adds to each distribution."""
    rounds = session.rounds
    values: tuple[Iterable[float], ...] = (
        [len(rounds)],
        [sum(item.incr_tokens for item in rounds)],
        [sum(item.output_tokens for item in rounds)],
        [rounds[0].incr_tokens],
        (item.incr_tokens for item in rounds[1:]),
        (item.output_tokens for item in rounds),
        (history for history, _ in session.prompts_tokens()[1:]),
        [session.max_context_tokens],
        (item.tool_s for item in rounds[1:]),
    )
    return dict(zip(_DISTRIBUTIONS, values, strict=True))


def describe(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles, smallest and largest value; None without values."""
    data = np.fromiter((float(value) for value in values), dtype=float)
    if not data.size:
        return None
    described = {"mean": float(data.mean()), "min": float(data.min())}
    described |= {f"p{percent}": float(np.percentile(data, percent)) for percent in PERCENTILES}
    return described | {"max": float(data.max())}


def format_stats(stats: dict[str, Any]) -> str:
    rate = f", {stats['rate']:.3g} sessions/s" if stats["rate"] is not None else ""
    shared = f" ({stats['shared_tokens_total']} of them shared)" if stats["shared_tokens_total"] else ""
    lines = [
        f"sessions {stats['sessions']}, rounds {stats['rounds']}, arrivals over {stats['span_s']:.1f} s{rate}",
        f"tokens: {stats['incr_tokens_total']} prefilled{shared}, {stats['output_tokens_total']} generated; "
        f"{stats['rewrites']} rounds rewrite their context; {stats['rounds_with_text']} rounds carry text",
        "",
        f"{'':28}" + "".join(f"{name:>10}" for name in ("mean", "min", "p50", "p95", "p99", "max")),
    ]
    for name, values in stats.items():
        if isinstance(values, dict):
            lines.append(f"{name:28}" + "".join(f"{value:>10.1f}" for value in values.values()))
    return "\n".join(lines)


def _rewrites(session: Session) -> int:
    context_tokens = 0
    rewrites = 0
    for (history, increment), item in zip(session.prompts_tokens(), session.rounds, strict=True):
        rewrites += history < context_tokens
        context_tokens = history + increment + item.output_tokens
    return rewrites


# -- synthetic agent sessions with the means of the AMPD paper's workload table (arXiv 2602.14516)


class Lengths(StrEnum):
    """Whether the table's token counts are totals of a session or means of a round. The paper leaves it open."""

    PER_SESSION = "per-session"
    PER_ROUND = "per-round"


@dataclass(frozen=True, slots=True)
class Workload:
    """The known figures of a workload, and our assumptions where the paper has none.

    Attributes:
        mean_rounds, mean_prefill_tokens, mean_output_tokens: the paper's table.
        draw_rounds: assumption: how the number of rounds is spread around its mean.
        initial_share: assumption: the first round's expected share of a session's prefill tokens.
        spread: assumption: sigma of the log-normal factor on a session's tokens.
        mean_tool_s: assumption: mean tool time, log-normal with sigma 1.
    """

    mean_rounds: float
    mean_prefill_tokens: float
    mean_output_tokens: float
    draw_rounds: Callable[[random.Random], int]
    initial_share: float
    spread: float
    mean_tool_s: float


def _poisson(mean: float, rng: random.Random) -> int:
    count, clock = 0, rng.expovariate(1.0)
    while clock < mean:
        count += 1
        clock += rng.expovariate(1.0)
    return count


def _two_and_poisson(mean_rounds: float) -> Callable[[random.Random], int]:
    return lambda rng: 2 + _poisson(mean_rounds - 2, rng)


def _two_and_negative_binomial(mean_rounds: float, shape: float) -> Callable[[random.Random], int]:
    """A Poisson whose mean is itself gamma distributed: a long tail of long sessions."""
    return lambda rng: 2 + _poisson(rng.gammavariate(shape, (mean_rounds - 2) / shape), rng)


WORKLOADS: dict[str, Workload] = {
    "toolbench": Workload(3.96, 703.79, 50.39, _two_and_poisson(3.96), 0.6, 0.5, 1.0),
    "gaia": Workload(11.32, 6161.02, 528.76, _two_and_negative_binomial(11.32, 3.0), 0.3, 0.8, 3.0),
    "hotpotqa": Workload(3.0, 1569.8, 80.03, lambda _: 3, 1 / 3, 0.3, 0.3),
    "dureader": Workload(3.0, 3081.23, 150.10, lambda _: 3, 1 / 3, 0.4, 0.3),
}

_TOOL_SIGMA = 1.0
_SPLIT_SHAPE = 2.0
"""Gamma shape of the weights by which a session's tokens are split over its rounds (smaller is more uneven)."""


def generate(
    workload: str,
    sessions: int,
    rate: float,
    seed: int,
    lengths: Lengths = Lengths.PER_SESSION,
) -> Iterator[Session]:
    """`sessions` sessions arriving as a Poisson process of `rate` per second; the same seed gives the same trace.

    A session of n rounds expects n times the per-round mean (per session: the table's total over the mean rounds), so
    that long sessions carry more tokens and the mean over sessions is the table's.
    """
    spec = WORKLOADS[workload]
    arrivals = poisson_arrivals(sessions, rate, random.Random(f"{seed}/arrivals"))
    rng = random.Random(f"{seed}/{workload}")
    for number, arrival_s in enumerate(arrivals):
        rounds = _rounds(spec, lengths, rng)
        yield Session(session_id=f"{workload}-{seed}-{number:05d}", arrival_s=round(arrival_s, 6), rounds=rounds)


def _rounds(spec: Workload, lengths: Lengths, rng: random.Random) -> tuple[Round, ...]:
    count = spec.draw_rounds(rng)
    scale = count if lengths is Lengths.PER_ROUND else count / spec.mean_rounds
    prefill = _total(spec.mean_prefill_tokens * scale, spec.spread, count, rng)
    output = _total(spec.mean_output_tokens * scale, spec.spread, count, rng)
    rest = (1 - spec.initial_share) / (count - 1)
    increments = _split(prefill, [spec.initial_share] + [rest] * (count - 1), rng)
    outputs = _split(output, [1.0] * count, rng)
    return tuple(
        Round(
            incr_tokens=increments[index],
            output_tokens=outputs[index],
            tool_s=round(_log_normal(spec.mean_tool_s, _TOOL_SIGMA, rng), 3) if index else 0.0,
        )
        for index in range(count)
    )


def _log_normal(mean: float, sigma: float, rng: random.Random) -> float:
    return exp(rng.normalvariate(log(mean) - sigma * sigma / 2, sigma))


def _total(mean: float, sigma: float, at_least: int, rng: random.Random) -> int:
    # Rounded up or down by chance, so that rounding does not move the mean.
    return max(at_least, int(_log_normal(mean, sigma, rng) + rng.random()))


def _split(total: int, shares: list[float], rng: random.Random) -> list[int]:
    """Split `total` into parts of at least 1 that expect `shares` of it."""
    free = total - len(shares)
    weights = [rng.gammavariate(_SPLIT_SHAPE * share * len(shares) / sum(shares), 1.0) for share in shares]
    whole = sum(weights)
    edges = [0]
    reached = 0.0
    for weight in weights:
        reached += weight
        edges.append(round(free * reached / whole))
    return [1 + right - left for left, right in pairwise(edges)]


# -- `ampd trace`: convert, generate and describe traces


class ConvertSettings(Settings):
    """Convert a trace of another format (`ampd trace formats` lists them) to ours.

    Without FORMAT the rows of the source tell it. Without OUT the trace is written to NAME.trace.jsonl
    in the current folder.
    """

    known_names: ClassVar = {"places": lambda: FORMATS}

    places: CliPositionalArg[list[str]] = Field(
        description="[FORMAT] IN [OUT]: name of the source format; file or folder to read; trace file to write "
        "(.jsonl or .jsonl.gz)."
    )
    tokenizer: Path | None = Field(
        None,
        description="tokenizer.json or model folder, for sources that hold words; default: an approximation.",
    )
    text: bool = Field(False, description="Keep the words of every increment, for replays with real words.")


class GenerateSettings(Settings):
    """Generate synthetic sessions with the means of the AMPD paper's workloads."""

    workload: CliPositionalArg[str] = Field(description=f"One of {', '.join(WORKLOADS)}.")
    sessions: int = Field(100, ge=1, description="How many sessions.")
    rate: float = Field(1.0, gt=0, description="Session arrivals per second (Poisson).")
    seed: int = Field(0, description="The same seed gives the same trace.")
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
    return run_subcommand("ampd trace", _HELP, commands, argv)


_HELP = """usage: ampd trace COMMAND ...

  convert [FORMAT] IN [OUT]  convert a trace of another format
  generate WORKLOAD          generate synthetic sessions of a workload of the paper
  stats TRACE                describe a trace
  formats                    list the formats that convert reads
  list                       list the shipped traces

ampd trace COMMAND --help explains one."""


def _convert(argv: Sequence[str]) -> None:
    settings = parse_settings(ConvertSettings, argv, "ampd trace convert")
    named, source, output = _places(settings.places)
    options = LoadOptions(count_tokens=load_counter(settings.tokenizer), with_text=settings.text)
    if named is None:
        named, why = detect(source)
        print(f"{source}: format {named}, because {why}", file=sys.stderr)
    sessions = load_sessions(named, source, options)
    count = write_trace(_unique(sessions), output)
    if not count:
        output.unlink()
        raise UserError(f"{source}: holds no session of the format {named}")
    print(f"{output}: {counted(count, 'session')}", file=sys.stderr)


def _places(places: Sequence[str]) -> tuple[str | None, Path, Path]:
    """The format, if it is named, the source and the output."""
    named = places[0] if len(places) == 3 else None
    if len(places) == 2 and format_name(places[0]) and not Path(places[0]).exists():
        named = places[0]
    source, *output = places[1:] if named else places
    if len(output) > 1:
        raise UserError(f"ampd trace convert: takes [FORMAT] IN [OUT], not {len(places)} arguments")
    stem = Path(source).name.split(".")[0] or Path(source).resolve().name
    return named, Path(source), Path(output[0] if output else f"{stem}.trace.jsonl")


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
        known = ", ".join(WORKLOADS) + did_you_mean(settings.workload, WORKLOADS)
        raise UserError(f"ampd trace generate: unknown workload {settings.workload!r}; known: {known}")
    sessions = generate(settings.workload, settings.sessions, settings.rate, settings.seed)
    count = write_trace(sessions, settings.output)
    print(f"{settings.output}: {counted(count, 'session')}", file=sys.stderr)


def _stats(argv: Sequence[str]) -> None:
    settings = parse_settings(StatsSettings, argv, "ampd trace stats")
    stats = trace_stats(stream_trace(settings.trace))
    print(json.dumps(stats, indent=2) if settings.as_json else format_stats(stats))


def _formats(argv: Sequence[str]) -> None:
    del argv
    for name, known in FORMATS.items():
        print(f"{name:18} {known.summary}")


def _list(argv: Sequence[str]) -> None:
    del argv
    for name in shipped_traces():
        print(name)
