"""From a finished plan to its manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from ampd.errors import UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import DEGREES, MODELS
from ampd.policies import defaults
from ampd.policies.naming import parse_named
from ampd.policies.registry import MODULES_VARIABLE
from planner.layout.explain import shortfall
from planner.layout.layout import Layout, layout_label
from planner.manifest.files import base_objects, check_target, is_single_file, write_manifest
from planner.manifest.objects import STORE_GIB_PER_GPU, Deployment, deployment_objects
from planner.plan_settings import PlanSettings
from workloads.results import local_share

# -- a plan's inputs and expectations as annotations, to compare with the figures of the running graph

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
    return {f"{PREFIX}{name}": _annotation(value) for name, value in values.items() if value is not None}


def with_warnings(annotations: Mapping[str, str], warnings: Sequence[str]) -> dict[str, str]:
    """The annotations with the warnings, one per line. Without warnings that annotation is missing."""
    return {**annotations, **({f"{PREFIX}warnings": "\n".join(warnings)} if warnings else {})}


def miss(layout: Mapping[str, Any]) -> str | None:
    """How far a layout of a plan's result misses the targets, as a clause; None: it meets them."""
    if layout["meets_slo"]:
        return None
    return f"it {shortfall(layout['headroom'], layout['attainment']['mean'])} at the planned rate"


def _annotation(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_PARSERS: dict[str, tuple[str, str | None]] = {
    "qwen3-32b": ("hermes", "qwen3"),
    "qwen3-0.6b": ("hermes", "qwen3"),
    "llama-3.1-70b": ("llama3_json", None),
    "llama-3.1-8b": ("llama3_json", None),
}
"""Dynamo's parsers of tool calls and of reasoning, for the presets whose chat templates have them."""

SECRETS = tuple(
    f'kubectl create secret generic {name} --from-literal={key}="$(openssl rand -hex 32)"'
    for name, key in (("ampd-redis", "password"), ("ampd-graph", "secret"))
)
"""The commands that make what a graph's pods mount and no manifest makes. The password becomes part of a URL."""

MODELS_MOUNT = "/models"
"""Where the base mounts the volume with the models."""


def check_flags(settings: PlanSettings) -> None:
    """Refuse wrong flags before the plan is made.

    Raises:
        UserError: as one line.
    """
    if settings.output_manifest is None:
        return
    if settings.manifest_layout > settings.top:
        raise UserError(f"--manifest-layout: {settings.manifest_layout} is more than the {settings.top} of --top")
    if settings.manifest_model_path is not None and not _is_on_volume(settings.manifest_model_path):
        raise UserError(
            f"--manifest-model-path: {settings.manifest_model_path} is not a folder below {MODELS_MOUNT}, where the "
            "volume `ampd-models` is mounted"
        )
    check_target(settings.output_manifest)


def write_plan(
    settings: PlanSettings, layouts: list[Layout], model: PiecewiseModel, result: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Write the manifest that the settings ask for.

    Args:
        layouts: the plan's, best first.
        result: what `--json` prints.

    Returns:
        Warnings, one line each, and lines about what the manifest needs, with the commands. The manifest has both in
        its head, and the warnings in its annotations.

    Raises:
        UserError: there is no such layout, or the manifest cannot be written.
    """
    path = settings.output_manifest
    if path is None:
        return [], []
    if settings.manifest_layout > len(layouts):
        raise UserError(
            f"--manifest-layout: there is no layout {settings.manifest_layout}, the plan has {len(layouts)}"
        )
    deployment = _deployment(settings, layouts[settings.manifest_layout - 1], model, result)
    warnings = _warnings(deployment, result["layouts"][settings.manifest_layout - 1])
    deployment = replace(deployment, annotations=with_warnings(deployment.annotations, warnings))
    title = (
        f"{deployment.layout}: {deployment.layout.gpus} GPUs. The plan's expectations are in the graph's annotations."
    )
    head = [title, *_needs(deployment, Path(path.name)), *(f"WARNING: {warning}" for warning in warnings)]
    write_manifest(path, deployment_objects(deployment, base_objects()), head)
    return warnings, _needs(deployment, path)


def _deployment(settings: PlanSettings, layout: Layout, model: PiecewiseModel, result: Mapping[str, Any]) -> Deployment:
    preset, folder = _model_names(settings, model)
    path = PurePosixPath(settings.manifest_model_path or f"{MODELS_MOUNT}/{folder}")
    tool_calls, reasoning = _PARSERS.get(preset or "", (None, None))
    return Deployment(
        layout=layout,
        model_path=str(path),
        model_name=path.name,
        profile=model.profile,
        slo=settings.slo,
        policies={
            "routing": settings.routing,
            "binding": defaults.BINDING,
            "pools": defaults.POOLS,
            "ordering": settings.ordering,
            "slicing": settings.slicing,
        },
        tool_call_parser=tool_calls,
        reasoning_parser=reasoning,
        kv_capacity_tokens=settings.kv_capacity_tokens,
        store_gib_per_gpu=settings.kv_store_gib_per_gpu or STORE_GIB_PER_GPU,
        policy_modules=os.environ.get(MODULES_VARIABLE, ""),
        image=settings.manifest_image,
        annotations=expectations(result, settings.manifest_layout - 1, version("ampd"), preset, settings.gpu),
    )


def _model_names(settings: PlanSettings, model: PiecewiseModel) -> tuple[str | None, str]:
    """(preset that the model is, or None; name for its folder)."""
    # A profile may name the model with its owner and the data type: "Qwen/Qwen3-32B, 16-bit".
    named = settings.model or model.provenance.model.partition(",")[0].rpartition("/")[2]
    if named.lower() in MODELS:
        return named.lower(), named.lower()
    if settings.model is not None:
        path = Path(settings.model).expanduser().resolve()
        named = path.name if path.is_dir() else path.parent.name
    return None, re.sub(r"[^A-Za-z0-9._-]+", "-", named).strip("-.") or "model"


def _is_on_volume(path: str) -> bool:
    folder = PurePosixPath(path)
    return PurePosixPath(MODELS_MOUNT) in folder.parents and ".." not in folder.parts


def _needs(deployment: Deployment, path: Path) -> list[str]:
    image = "" if deployment.image else "your image in place of `ampd` (`images:` of an overlay, or --manifest-image), "
    return [
        f"It needs Dynamo's operator, {image}and in the namespace the volume claim `ampd-models`",
        f"({MODELS_MOUNT} in the pods) with the model in {deployment.model_path}, and two Secrets:",
        *SECRETS,
        f"kubectl apply -{'f' if is_single_file(path) else 'k'} {path}",
    ]


def _warnings(deployment: Deployment, planned: Mapping[str, Any]) -> list[str]:
    layout = deployment.layout
    notes = []
    if (missed := miss(planned)) is not None:
        notes.append(f"the layout does not meet the targets: {missed}")
    if degrees := sorted({tp for group in layout.groups.values() for tp, _ in group if tp not in DEGREES}):
        notes.append(
            f"the layout has replicas of TP {', '.join(map(str, degrees))}; SGLang workers refuse these degrees, so "
            "that these pods will not start"
        )
    if deployment.tool_call_parser is None:
        notes.append(
            f"no tool-call parser is known for {deployment.model_name}; if it calls tools, give the coordinator "
            "--dyn-tool-call-parser"
        )
    if deployment.policy_modules:
        notes.append(f"the image must hold {deployment.policy_modules} ({MODULES_VARIABLE})")
    for policy in deployment.policies.values():
        name, parameters = parse_named(policy)
        files = [value for value in parameters.values() if isinstance(value, str) and Path(value).is_file()]
        notes += [f"the image must hold {file}, which the policy {name} reads" for file in files]
    return [" ".join(note.split()) for note in notes]
