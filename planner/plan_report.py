"""The report of `ampd plan`: the layouts, why they were chosen, and what replicas carry."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from planner.layout.formulation import Capacities
from planner.layout.search import Plan
from planner.page import Section, write_page
from workloads.plots import svg

_COLOURS = ("#2f6fde", "#e07b39", "#1f9d78", "#7b4fc9", "#c62f3c", "#8a6d1d")
_SIZE = (5.2, 3.2)
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
    names = [str(one.choice.layout) for one in plan.layouts]
    rows = [_row(name, layout) for name, layout in zip(names, result["layouts"], strict=True)]
    sections = [
        Section("Layouts, best first", head=_HEAD, rows=rows),
        Section("Why", text=result["explanation"]),
    ]
    for phase in ("prefill", "decode"):
        picture = svg(partial(_curves, capacities=plan.capacities, phase=phase), _SIZE)
        sections.append(Section(f"What a GPU carries: {phase}", svg=picture, is_half=True))
    slo, model = result["slo"], result["performance_model"]
    lead = (
        f"{result['trace']} at {result['rate']:g} sessions/s on {result['gpus']} GPUs; "
        f"{model['model']} on {model['gpu']} ({model['kind']} performance model); "
        f"targets TTFT {slo['ttft'] * 1e3:g} ms, ITL {slo['itl'] * 1e3:g} ms. Planned in {result['seconds']:.1f} s."
    )
    write_page(path, "Plan", lead, sections)


def _row(name: str, layout: dict[str, Any]) -> list[str]:
    slack, seen = layout["slack"], layout["simulated"]
    routed = sum(seen["routes"].values()) or 1
    return [
        name,
        str(layout["gpus"]),
        f"{layout['objective']:.2f}",
        f"{layout['headroom']:.2f}",
        f"{slack['prefill']:.2f}x",
        f"{slack['decode']:.2f}x",
        f"{slack['kv_memory']:.1f}x",
        f"{seen['attainment']['rounds']:.1%}",
        f"{(seen['ttft_s']['p95'] or 0) * 1e3:,.0f} ms",
        f"{(seen['itl_s']['p95'] or 0) * 1e3:,.1f} ms",
        f"{seen['routes']['local'] / routed:.0%}",
    ]


def _curves(axes: Any, capacities: Capacities, phase: str) -> None:
    """Sessions per second and GPU at each level, one line a degree."""
    table = capacities.prefill if phase == "prefill" else capacities.decode
    for degree, colour in zip(capacities.degrees, _COLOURS, strict=False):
        per_gpu = [rate / degree for rate in table[degree]]
        axes.plot(capacities.levels, per_gpu, color=colour, label=f"TP{degree}")
    axes.axvline(1.0, color="#3a3f4b", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("P95 / target")
    axes.set_ylabel("sessions per second and GPU")
    axes.legend(frameon=False, fontsize=8)
