"""The report of `ampd plan`: the layouts, why they were chosen, and how much load replicas carry."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ampd.reports.figures import format_ms, format_share
from ampd.reports.page import Section, write_page
from ampd.reports.plots import HALF_CARD, TARGET_COLOUR, colours, legend_above, svg
from planner.layout.formulation import Capacities
from planner.layout.search import Plan
from workloads.results import local_share

_HEAD = (
    "layout",
    "GPUs",
    "P95 / target",
    "head-room",
    "prefill",
    "decode",
    "KV memory",
    "rounds attained",
    "TTFT P95",
    "ITL P95",
    "local",
)


def write_report(path: Path, result: dict[str, Any], plan: Plan) -> None:
    """Write the report of a plan. Raises `RunError` if the file cannot be written."""
    names = [str(checked.choice.layout) for checked in plan.layouts]
    rows = [_row(name, layout) for name, layout in zip(names, result["layouts"], strict=True)]
    sections = [
        Section("Layouts, best first", head=_HEAD, rows=rows),
        Section("Why", text=result["explanation"]),
    ]
    for phase in ("prefill", "decode"):
        picture = svg(partial(_curves, capacities=plan.capacities, phase=phase), HALF_CARD)
        sections.append(Section(f"What a GPU carries: {phase}", svg=picture, is_half=True))
    slo, model = result["slo"], result["performance_model"]
    lead = (
        f"{result['trace']} at {result['rate']:g} sessions/s on {result['gpus']} GPUs; "
        f"{model['model']} on {model['gpu']} ({model['kind']} performance model); "
        f"targets TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms. Planned in {result['seconds']:.1f} s. "
        "All figures are predictions of the performance model; `rounds attained` is the share of simulated rounds that "
        "meet both targets."
    )
    write_page(path, "Plan", lead, sections)


def _row(name: str, layout: dict[str, Any]) -> list[str]:
    slack, simulated = layout["slack"], layout["simulated"]
    return [
        name,
        str(layout["gpus"]),
        f"{layout['objective']:.2f}",
        f"{layout['headroom']:.2f}",
        f"{slack['prefill']:.2f}x",
        f"{slack['decode']:.2f}x",
        " / ".join(f"{slack[name]:.1f}x" for name in ("kv_memory", "host_memory") if name in slack),
        format_share(simulated["attainment"]["rounds"]),
        f"{format_ms(simulated['ttft_s']['p95'], 0)} ms",
        f"{format_ms(simulated['itl_s']['p95'])} ms",
        format_share(local_share(simulated), 0),
    ]


def _curves(axes: Any, capacities: Capacities, phase: str) -> None:
    """Sessions per second and GPU at each level, one line per degree."""
    table = capacities.prefill if phase == "prefill" else capacities.decode
    for degree, colour in zip(capacities.degrees, colours(len(capacities.degrees)), strict=True):
        per_gpu = [rate / degree for rate in table[degree]]
        axes.plot(capacities.levels, per_gpu, color=colour, label=f"TP{degree}")
    axes.axvline(1.0, color=TARGET_COLOUR, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("P95 / target")
    axes.set_ylabel("sessions per second and GPU")
    legend_above(axes)
