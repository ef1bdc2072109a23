"""What a plan expects, as annotations: where the figures of a running graph are compared with them, and who made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.layout.explain import shortfall

PREFIX = "ampd.dev/"


def expectations(
    result: Mapping[str, Any], index: int, version: str, model: str | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Annotations of the layout at `index` of a plan's result (the object that `--json` prints).

    `model`, `gpu`: the presets that were planned with; None: what the performance model says of itself. Values are
    strings, as Kubernetes wants them, in the units that their names say; what a simulation could not tell (ITL where
    every round has one token) is left out.
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
        "layout": _layout(layout),
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
        "expected-itl-p95-seconds": simulated["itl_s"]["p95"],
        "expected-local-rounds": _local(simulated["routes"]),
    }
    return {f"{PREFIX}{name}": _text(value) for name, value in values.items() if value is not None}


def with_warnings(annotations: Mapping[str, str], warnings: Sequence[str]) -> dict[str, str]:
    """The annotations with the warnings, a line each; without warnings there is no such annotation."""
    return {**annotations, **({f"{PREFIX}warnings": "\n".join(warnings)} if warnings else {})}


def miss(layout: Mapping[str, Any]) -> str | None:
    """By how much a layout of a plan's result misses the targets, as half a sentence; None: it meets them."""
    if layout["meets_slo"]:
        return None
    at_p95 = " at P95" if layout["headroom"] >= 1 else ""
    return f"it {shortfall(layout['objective'], layout['headroom'])}{at_p95}"


def _layout(layout: Mapping[str, Any]) -> str:
    sides = (
        "+".join(f"{group['replicas']}xTP{group['tp']}" for group in layout[role]) for role in ("prefill", "decode")
    )
    return "prefill {}, decode {}".format(*sides)


def _local(routes: Mapping[str, int]) -> float | None:
    routed = sum(routes.values())
    return routes["local"] / routed if routed else None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
