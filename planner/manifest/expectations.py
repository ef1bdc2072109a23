"""A plan's inputs and expectations as annotations, to compare with the figures of the running graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.layout.explain import shortfall
from planner.layout.layout import layout_label
from workloads.results import local_share

PREFIX = "ampd.dev/"


def expectations(
    result: Mapping[str, Any], index: int, version: str, model: str | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Annotations of the layout at `index` of a plan's result (the object that `--json` prints).

    `model`, `gpu`: the presets of the plan; None: the names in the performance model. Values are strings, because
    Kubernetes requires it, in the units of their names. Unknown values (ITL if every round has one token) are left out.
    """
    layout, source = result["layouts"][index], result["performance_model"]
    simulated = layout["simulated"]
    values = {
        "version": version,
        "model": model or source["model"],
        "gpu": gpu or source["gpu"],
        "performance-model": source["kind"],
        "trace": Path(result["trace"]).name,
        "rate-sessions-per-second": result["rate"],
        "seed": result["seed"],
        "layout": layout_label(layout),
        "layout-rank": index + 1,
        "gpus": layout["gpus"],
        "objective": layout["objective"],
        "headroom": layout["headroom"],
        "meets-targets": layout["meets_slo"],
        "ttft-target-seconds": result["slo"]["ttft"],
        "itl-target-seconds": result["slo"]["itl"],
        "expected-attainment-rounds": simulated["attainment"]["rounds"],
        "expected-attainment-sessions": simulated["attainment"]["sessions"],
        "expected-ttft-p95-seconds": simulated["ttft_s"]["p95"],
        "expected-itl-p95-seconds": simulated["mean_itl_s"]["p95"],
        "expected-local-rounds": local_share(simulated),
    }
    return {f"{PREFIX}{name}": _text(value) for name, value in values.items() if value is not None}


def with_warnings(annotations: Mapping[str, str], warnings: Sequence[str]) -> dict[str, str]:
    """The annotations with the warnings, one per line. Without warnings that annotation is missing."""
    return {**annotations, **({f"{PREFIX}warnings": "\n".join(warnings)} if warnings else {})}


def miss(layout: Mapping[str, Any]) -> str | None:
    """How far a layout of a plan's result misses the targets, as a clause; None: it meets them."""
    if layout["meets_slo"]:
        return None
    return f"it {shortfall(layout['headroom'], layout['attainment']['mean'])} at the planned rate"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
