"""The plots of a replay report, as inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ampd.types import Slo
from workloads.results import RoundRecord

COLOURS = {"local": "#2f6fde", "remote": "#e07b39", "unknown": "#7a869a", "error": "#c62f3c", "slo": "#3a3f4b"}
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "svg.hashsalt": "ampd",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ef",
    "axes.edgecolor": "#9aa3b2",
    "axes.axisbelow": True,
}
_MS = 1e3


def plots(records: Sequence[RoundRecord], slo: Slo | None) -> list[tuple[str, str]]:
    """(title, SVG) of every plot that the records have data for."""
    done = [record for record in records if record.ttft_s is not None and record.error is None]
    initial = [record.ttft_s for record in done if record.index == 0 and record.ttft_s is not None]
    later = [record.ttft_s for record in done if record.index > 0 and record.ttft_s is not None]
    gaps = [gap_s for record in done for gap_s in record.gaps_s]
    ttft_s, itl_s = (slo.ttft_s, slo.itl_s) if slo else (None, None)
    series = {"initial prefill": (initial, "#7b4fc9"), "incremental prefill": (later, "#1f9d78")}
    drawn = [
        ("Time to first token", svg(lambda axes: draw_cdf(axes, series, ttft_s, "TTFT (ms)"), (5.2, 3.0))),
        (
            "Inter-token latency",
            svg(lambda axes: draw_cdf(axes, {"": (gaps, "#2f6fde")}, itl_s, "ITL (ms)"), (5.2, 3.0)),
        ),
        ("Rounds over time", svg(lambda axes: _timeline(axes, records), (10.8, _timeline_height(records)))),
    ]
    return drawn if records else []


def svg(draw: Callable[[Any], None], size_inches: tuple[float, float]) -> str:
    """What `draw` puts on the axes, as one SVG element in the style of our reports."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    # Only the element: no XML header, and no reference to the outside.
    text = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def draw_cdf(axes: Any, series: dict[str, tuple[list[float], str]], target_s: float | None, label: str) -> None:
    """Cumulative shares of name -> (seconds, colour), in milliseconds, with the target as a line."""
    for name, (values_s, colour) in series.items():
        if values_s:
            ordered = np.sort(np.asarray(values_s)) * _MS
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            axes.step(ordered, share, where="post", color=colour, linewidth=1.8, label=name or None)
    if target_s is not None:
        axes.axvline(target_s * _MS, color=COLOURS["slo"], linestyle="--", linewidth=1.2, label="SLO")
    values = [value for values_s, _ in series.values() for value in values_s if value > 0]
    if values and max(values) > 20 * np.median(values):
        axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower right")


def _timeline_height(records: Sequence[RoundRecord]) -> float:
    return min(1.2 + 0.16 * len({record.session_id for record in records}), 9.0)


def _timeline(axes: Any, records: Sequence[RoundRecord]) -> None:
    """One line a session; a pale bar is the prefill (until the first token), a full one the decode."""
    lanes = {name: lane for lane, name in enumerate(dict.fromkeys(r.session_id for r in _by_time(records)))}
    shown: set[str] = set()
    for record in records:
        kind = "error" if record.error is not None else record.route or "unknown"
        colour, lane = COLOURS.get(kind, COLOURS["unknown"]), lanes[record.session_id]
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
    axes.set_xlabel("seconds since the start of the run")
    axes.set_ylabel("session")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if shown:
        axes.legend(frameon=False, loc="upper center", ncols=4, bbox_to_anchor=(0.5, 1.12 if len(lanes) < 20 else 1.06))


def _by_time(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    return sorted(records, key=lambda record: record.sent_s)
