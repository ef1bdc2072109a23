"""The HTML report of a replay: one file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ampd.reports import format_bytes, format_ms, format_share
from ampd.reports.page import (
    FULL_CARD_WIDTH,
    HALF_CARD,
    draw_cdf,
    legend_above,
    mark_missed,
    svg,
    template_environment,
    write_html,
)
from ampd.types import Slo
from workloads.results import MissedRound, RoundRecord, missed_rounds, prompt_tokens_note

_COLOURS = {"local": "#2f6fde", "remote": "#e07b39", "unknown": "#7a869a", "error": "#c62f3c"}
_MOST_MISSED = 200
"""Missed rounds that the report lists; the result's JSON file has the others."""
_LATENCIES = {
    "ttft_s": "TTFT",
    "ttft_initial_s": "TTFT, initial prefill",
    "ttft_incremental_s": "TTFT, incremental prefill",
    "itl_s": "ITL",
    "e2e_s": "Round, end to end",
}


def write_report(path: Path, result: Mapping[str, Any], records: Sequence[RoundRecord]) -> None:
    """Write the report of a result (as `workloads.results.summarise` makes it) and its rounds.

    Raises:
        RunError: the file cannot be written.
    """
    write_html(path, render_report(result, records))


def render_report(result: Mapping[str, Any], records: Sequence[RoundRecord]) -> str:
    slo = Slo(result["slo"]["ttft"], result["slo"]["itl"]) if result["slo"] else None
    missed = missed_rounds(records, slo) if slo else []
    environment = template_environment("workloads")
    environment.filters |= {"ms": format_ms, "share": format_share, "bytes": format_bytes}
    routes = result["routes"]
    reasons = Counter((record.route, str(record.decision.get("reason", "-"))) for record in records if record.route)
    return environment.get_template("report.html.j2").render(
        result=result,
        settings=result.get("settings", {}),
        prompt_tokens=prompt_tokens_note(result),
        latencies={label: result[key] for key, label in _LATENCIES.items()},
        plots=_plots(records, slo, missed),
        missed=missed[:_MOST_MISSED],
        missed_in_all=len(missed),
        colours=_COLOURS,
        routed=sum(routes.values()),
        reasons=[(route, reason, count) for (route, reason), count in reasons.most_common()],
        errors=Counter(record.error for record in records if record.error).most_common(10),
    )


def _plots(records: Sequence[RoundRecord], slo: Slo | None, missed: Sequence[MissedRound]) -> list[tuple[str, str]]:
    """(title, SVG) of every plot; none without records."""
    if not records:
        return []
    ttfts = [(record.index, record.ttft_s) for record in records if record.ttft_s is not None and record.error is None]
    gaps = [gap_s for record in records if record.error is None for gap_s in record.gaps_s]
    ttft_s, itl_s = (slo.ttft_s, slo.itl_s) if slo else (None, None)
    series = {
        "initial prefill": ([seconds for index, seconds in ttfts if index == 0], "#7b4fc9"),
        "incremental prefill": ([seconds for index, seconds in ttfts if index > 0], "#1f9d78"),
    }
    ttft = partial(draw_cdf, series=series, target_s=ttft_s, label="TTFT (ms)")
    itl = partial(draw_cdf, series={"": (gaps, "#2f6fde")}, target_s=itl_s, label="ITL (ms)")
    size = (FULL_CARD_WIDTH, min(1.2 + 0.16 * len({record.session_id for record in records}), 9.0))
    return [
        ("Time to first token", svg(ttft, HALF_CARD)),
        ("Inter-token latency", svg(itl, HALF_CARD)),
        ("Rounds over time", svg(partial(_timeline, records=records, missed=missed), size)),
    ]


def _timeline(axes: Any, records: Sequence[RoundRecord], missed: Sequence[MissedRound]) -> None:
    """One line per session; a pale bar is the prefill (until the first token), a full bar the decode.

    A triangle marks when a round missed a target.
    """
    in_order = sorted(records, key=lambda record: record.sent_s)
    lanes = {name: lane for lane, name in enumerate(dict.fromkeys(record.session_id for record in in_order))}
    shown: set[str] = set()
    for record in records:
        kind = "error" if record.error is not None else record.route or "unknown"
        colour, lane = _COLOURS.get(kind, _COLOURS["unknown"]), lanes[record.session_id]
        label = kind if kind not in shown else None
        shown.add(kind)
        if record.ttft_s is None or record.e2e_s is None:
            axes.plot(record.sent_s, lane, "x", color=colour, label=label, markersize=5)
            continue
        axes.barh(lane, record.ttft_s, left=record.sent_s, height=0.72, color=colour, alpha=0.38)
        axes.barh(
            lane,
            record.e2e_s - record.ttft_s,
            left=record.sent_s + record.ttft_s,
            height=0.72,
            color=colour,
            label=label,
        )
    mark_missed(axes, [late.at_s for late in missed], [lanes[late.session_id] for late in missed])
    axes.set_xlabel("seconds since the start of the run")
    axes.set_ylabel("session")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if shown or missed:
        legend_above(axes, columns=5)
