"""A result as a text table, times in milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ampd.reports.figures import format_bytes

_SHOWN_ERRORS = 3
_EXACT = 0.01
"""Prompts whose lengths differ from the trace's by at most this share count as exact."""
_LATENCIES = {
    "ttft_s": "TTFT",
    "ttft_initial_s": "  initial",
    "ttft_incremental_s": "  incremental",
    "itl_s": "ITL",
    "e2e_s": "round, end to end",
}


def format_result(result: Mapping[str, Any], errors: Sequence[str]) -> str:
    """The whole table; `errors` are the messages of the failed rounds."""
    lines = [_headline(result), "", f"{'ms':20}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p95", "p99"))]
    lines += [_latency_line(label, result[key]) for key, label in _LATENCIES.items()]
    lines += ["", *_attainment_lines(result), *_route_lines(result)]
    if note := prompt_tokens_note(result):
        lines.append(f"prompt tokens       {note}")
    return "\n".join([*lines, *_error_lines(errors)])


def prompt_tokens_note(result: Mapping[str, Any]) -> str:
    """By how much the server's prompts differed from the trace's; empty if they did not, or if no server counted."""
    tokens = result.get("prompt_tokens") or {"trace": 0, "server": 0}
    if abs(tokens["server"] - tokens["trace"]) <= _EXACT * tokens["trace"]:
        return ""
    times = tokens["server"] / tokens["trace"]
    return f"{times:.2f} times the trace's, by the server's count; only prompts of token ids keep the trace's lengths"


def _headline(result: Mapping[str, Any]) -> str:
    state = ", interrupted" if result.get("interrupted") else ""
    return (
        f"{result['sessions']} sessions, {result['rounds']} rounds, {result['output_tokens']} tokens generated "
        f"in {result['duration_s']:.1f} s, {result['errors']} errors{state}"
    )


def _latency_line(label: str, values: Mapping[str, float | None]) -> str:
    cells = (f"{value * 1e3:>10.1f}" if value is not None else f"{'-':>10}" for value in values.values())
    return f"{label:20}" + "".join(cells)


def _attainment_lines(result: Mapping[str, Any]) -> list[str]:
    slo, reached = result["slo"], result["attainment"]
    if slo is None:
        return ["SLO attainment      - (give --ttft and --itl)"]
    parts = [f"{value:.1%} of {name}" for name, value in reached.items() if value is not None]
    targets = f"TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms"
    return [f"SLO attainment      {', '.join(parts) or '-'} ({targets})"]


def _route_lines(result: Mapping[str, Any]) -> list[str]:
    routes, moved = result["routes"], result["kv_bytes"]
    known = sum(routes.values())
    if not known:
        return ["routes              - (the endpoint reports no routes)"]
    shares = ", ".join(f"{count} {name} ({count / known:.0%})" for name, count in routes.items())
    return [
        f"routes              {shares}",
        f"KV moved            history {format_bytes(moved['history'])} (decode to prefill), "
        f"increment {format_bytes(moved['increment'])} (prefill to decode)",
    ]


def _error_lines(errors: Sequence[str]) -> list[str]:
    kinds = Counter(errors).most_common()
    lines = [f"error               {count} x {message}" for message, count in kinds[:_SHOWN_ERRORS]]
    if len(kinds) > _SHOWN_ERRORS:
        lines.append(f"                    and {len(kinds) - _SHOWN_ERRORS} other messages")
    return lines
