"""Statistics of a trace: sessions, rounds, tokens, gaps and rewrites, with percentiles."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from workloads.trace import Session

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
