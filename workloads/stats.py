"""Statistics of a trace: sessions, rounds, tokens, gaps and rewrites, with percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from workloads.trace import Session

PERCENTILES = (50, 95, 99)


def trace_stats(sessions: Sequence[Session]) -> dict[str, Any]:
    """Counts and distributions of a trace; lengths in tokens, times in seconds.

    `prefill_tokens_per_session` counts increments only: the work of a system that loses no KV.
    `tool_s` covers the rounds after the first. `rewrites` are rounds that kept less than the whole context.
    """
    rounds = [item for session in sessions for item in session.rounds]
    arrivals = sorted(session.arrival_s for session in sessions)
    span_s = arrivals[-1] - arrivals[0]
    return {
        "sessions": len(sessions),
        "rounds": len(rounds),
        "span_s": span_s,
        "rate": (len(sessions) - 1) / span_s if span_s > 0 else None,
        "incr_tokens_total": sum(item.incr_tokens for item in rounds),
        "output_tokens_total": sum(item.output_tokens for item in rounds),
        "rewrites": sum(_rewrites(session) for session in sessions),
        "rounds_with_text": sum(item.text is not None for item in rounds),
        "rounds_per_session": describe(len(session.rounds) for session in sessions),
        "prefill_tokens_per_session": describe(sum(r.incr_tokens for r in session.rounds) for session in sessions),
        "output_tokens_per_session": describe(sum(r.output_tokens for r in session.rounds) for session in sessions),
        "initial_tokens": describe(session.rounds[0].incr_tokens for session in sessions),
        "incremental_tokens": describe(item.incr_tokens for session in sessions for item in session.rounds[1:]),
        "output_tokens": describe(item.output_tokens for item in rounds),
        "history_tokens": describe(history for s in sessions for history, _ in s.prompts_tokens()[1:]),
        "max_context_tokens": describe(session.max_context_tokens for session in sessions),
        "tool_s": describe(item.tool_s for session in sessions for item in session.rounds[1:]),
    }


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
    lines = [
        f"sessions {stats['sessions']}, rounds {stats['rounds']}, arrivals over {stats['span_s']:.1f} s{rate}",
        f"tokens: {stats['incr_tokens_total']} prefilled, {stats['output_tokens_total']} generated; "
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
