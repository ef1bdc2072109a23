"""The report of `ampd plan`: the layouts, why they were chosen, and what each carries."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ampd.reports.figures import format_ms, format_share
from ampd.reports.page import Section, write_page
from ampd.reports.plots import HALF_CARD, TARGET_COLOUR, colours, legend_above, svg
from planner.layout.layout import layout_label
from workloads.results import local_share

_HEAD = (
    "layout",
    "GPUs",
    "rounds attained",
    "95 % interval",
    "carries, sessions/s",
    "95 % interval",
    "KV memory",
    "TTFT P95",
    "ITL P95",
    "local",
)


def write_report(path: Path, result: dict[str, Any]) -> None:
    """Write the report of a plan. Raises `RunError` if the file cannot be written."""
    layouts = result["layouts"]
    sections = [
        Section("Layouts, best first", head=_HEAD, rows=[_row(layout) for layout in layouts]),
        Section("Why", text=result["explanation"]),
        Section("Attainment over the session rate", svg=svg(partial(_curves, result=result), HALF_CARD), is_half=True),
    ]
    if result["variations"]:
        rows = [[each["name"], *_figure(each["attainment"], 100, "%")] for each in result["variations"]]
        sections.append(
            Section("If the circumstances differ", head=("", "rounds attained", "95 % interval"), rows=rows)
        )
    slo, model = result["slo"], result["performance_model"]
    lead = (
        f"{result['trace']} at {result['rate']:g} sessions/s on {result['gpus']} GPUs; "
        f"{model['model']} on {model['gpu']} ({model['kind']} performance model); "
        f"targets TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms. Planned in {result['seconds']:.1f} s. "
        "All figures are simulated with the performance model; `rounds attained` is the share of the rounds that meet "
        f"both targets, and a rate is carried if it is {result['attainment_level']:.0%} and nearly all sessions end in "
        "time."
    )
    write_page(path, "Plan", lead, sections)


def _row(layout: dict[str, Any]) -> list[str]:
    slack, simulated = layout["slack"], layout["simulated"]
    return [
        layout_label(layout),
        str(layout["gpus"]),
        *_figure(layout["attainment"], 100, "%"),
        *(_figure(layout["goodput"]) if layout["goodput"] else ("-", "-")),
        " / ".join(f"{slack[name]:.1f}x" for name in ("kv_memory", "host_memory") if name in slack),
        f"{format_ms(simulated['ttft_s']['p95'], 0)} ms",
        f"{format_ms(simulated['itl_s']['p95'])} ms",
        format_share(local_share(simulated), 0),
    ]


def _figure(figure: dict[str, Any], factor: float = 1.0, unit: str = "") -> tuple[str, str]:
    """The mean and the interval of a figure as text."""
    mean, low, high = (None if figure[key] is None else figure[key] * factor for key in ("mean", "low", "high"))
    return f"{mean:.3g}{unit}", "-" if low is None or high is None else f"{low:.3g} to {high:.3g}{unit}"


def _curves(axes: Any, result: dict[str, Any]) -> None:
    """Attainment at the rates that the search of each layout's goodput tried."""
    for layout, colour in zip(result["layouts"], colours(len(result["layouts"])), strict=True):
        points = [(each["rate"], each["attainment"]) for each in layout["curve"]]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=layout_label(layout))
    axes.axhline(result["attainment_level"], color=TARGET_COLOUR, linestyle="--", linewidth=1)
    axes.axvline(result["rate"], color=TARGET_COLOUR, linestyle=":", linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("sessions per second")
    axes.set_ylabel("share that meets both targets")
    legend_above(axes, columns=1)
