"""The result of `ampd plan` as text for people: its layouts as a table, with the explanation below."""

from __future__ import annotations

from typing import Any

from ampd.reports.figures import format_number, format_share
from planner.layout.explain import gpus_text, rate_text
from planner.layout.layout import layout_label
from workloads.results import local_share

_HEAD = ("layout", "GPUs", "carries", "attained", "TTFT P95", "mean ITL P95", "local")


def plan_table(result: dict[str, Any]) -> str:
    """The text of a plan. `result`: as `ampd plan --json` prints it. Without a layout it has the explanation only."""
    if not result["layouts"]:
        return "\n".join(result["explanation"])
    has_price = result["gpu_price"] is not None
    head = (*_HEAD, "per hour") if has_price else _HEAD
    table = [head, *(_row(layout) for layout in result["layouts"])]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in table)
    ]
    slo = result["slo"]
    rate = rate_text(result["rate"])
    title = (
        f"{gpus_text(result['gpus'])}, attained at {rate} sessions/s, TTFT {slo['ttft'] * 1e3:g} ms, "
        f"ITL {slo['itl'] * 1e3:g} ms: planned in {result['seconds']:.1f} s"
    )
    written = [f"Manifest: {result['manifest']}"] if result["manifest"] else []
    return "\n".join([title, "", *lines, "", *result["explanation"], *written])


def _row(layout: dict[str, Any]) -> tuple[str, ...]:
    simulated, goodput = layout["simulated"], layout["goodput"]
    price = [f"{layout['price_per_hour']:.2f}"] if "price_per_hour" in layout else []
    return (
        layout_label(layout),
        str(layout["gpus"]),
        "-" if goodput is None else f"{format_number(goodput['mean'])}/s",
        format_share(layout["attainment"]["mean"]),
        f"{(simulated['ttft_s']['p95'] or 0) * 1e3:.0f} ms",
        f"{(simulated['mean_itl_s']['p95'] or 0) * 1e3:.1f} ms",
        format_share(local_share(simulated), 0),
        *price,
    )
