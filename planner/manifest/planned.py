"""From a finished plan to its manifest: the objects of the base, with the graph and the performance model replaced."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any

from ampd.errors import RunError, UserError
from ampd.perf.piecewise import PiecewiseModel
from ampd.perf.presets import DEGREES, MODELS, model_shape
from ampd.perf.profile import PerformanceProfile
from ampd.policies import defaults
from ampd.policies.base import parse_named
from ampd.policies.registry import MODULES_VARIABLE
from ampd.types import Role, Slo
from planner.case_settings import STORE_GIB_PER_GPU, KvFormat, PlanSettings
from planner.layout.explain import shortfall
from planner.layout.layout import Layout, layout_label
from planner.manifest.files import (
    MODEL_FILE,
    PLAN_FILE,
    REHEARSAL_FILE,
    Object,
    base_objects,
    check_target,
    config_map,
    is_single_file,
    write_manifest,
)
from workloads.results import local_share

# -- flags and environment in a manifest. Each flag is one argument, `--name=value`, as in the base


def with_flags(arguments: Sequence[str], values: Mapping[str, str | None]) -> list[str]:
    """The arguments with these flags: in the place of the same flag, else at the end; None removes a flag."""
    rest = dict(values)
    result = []
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag not in values:
            result.append(argument)
        elif (value := rest.pop(flag, None)) is not None:
            result.append(f"{flag}={value}")
    return [*result, *(f"{flag}={value}" for flag, value in rest.items() if value is not None)]


def with_environment(entries: Sequence[Mapping[str, Any]], values: Mapping[str, str]) -> list[dict[str, Any]]:
    """The environment with these variables: in the place of the same variable, else at the end."""
    known = {entry["name"] for entry in entries}
    replaced = [
        {"name": entry["name"], "value": values[entry["name"]]} if entry["name"] in values else dict(entry)
        for entry in entries
    ]
    return [*replaced, *({"name": name, "value": value} for name, value in values.items() if name not in known)]


# -- resources of a pod of one replica, by its GPUs

GPU = "nvidia.com/gpu"

_SHARED_MEMORY_GIB_PER_GPU = 4
"""For NCCL between the GPUs of a replica."""
_CPUS_PER_GPU = 2
_HOST_GIB_PER_GPU = 8
"""For SGLang's process of a GPU."""
_LIMIT_OVER_REQUEST = 2
"""Room for the weights while they are loaded."""


def shared_memory(tp: int) -> str:
    """Size of `/dev/shm`."""
    return f"{tp * _SHARED_MEMORY_GIB_PER_GPU}Gi"


def store_gib(tp: int, gib_per_gpu: float = STORE_GIB_PER_GPU) -> str:
    """Size of the KV store. It is no part of `/dev/shm`."""
    return f"{tp * gib_per_gpu:g}"


def resources(tp: int, store_gib_per_gpu: float = STORE_GIB_PER_GPU) -> dict[str, Any]:
    """Requests and limits of a worker's container. Shared memory and the KV store count as memory of the pod."""
    memory_gib = tp * (_HOST_GIB_PER_GPU + _SHARED_MEMORY_GIB_PER_GPU) + ceil(tp * store_gib_per_gpu)
    gpus = {GPU: str(tp)}
    return {
        "requests": {"cpu": str(tp * _CPUS_PER_GPU), "memory": f"{memory_gib}Gi", **gpus},
        "limits": {"memory": f"{_LIMIT_OVER_REQUEST * memory_gib}Gi", **gpus},
    }


# -- a planned layout with all settings of its processes


@dataclass(frozen=True, slots=True)
class Deployment:
    """A layout and how it serves.

    Attributes:
        policies: kind -> policy, as written on command lines; paths are inside the containers.
        model_path: folder of the model inside the containers.
        model_name: its name for clients.
        tool_call_parser, reasoning_parser: names of Dynamo's parsers for the model; None: it has none.
        profile: the performance model of the plan.
        kv_capacity_tokens: limit of the KV memory of every replica; None: as much as fits.
        context_tokens: longest context; None: the model's.
        kv_cache_dtype: format of the KV, as SGLang names it; None: the model's.
        store_gib_per_gpu: size of the KV stores.
        policy_modules: `AMPD_POLICY_MODULES` of the plan; empty: none.
        annotations: the plan's expectations, for the graph object.
    """

    layout: Layout
    model_path: str
    model_name: str
    profile: PerformanceProfile
    slo: Slo
    policies: Mapping[str, str]
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    kv_capacity_tokens: int | None = None
    context_tokens: int | None = None
    kv_cache_dtype: str | None = None
    store_gib_per_gpu: float = STORE_GIB_PER_GPU
    policy_modules: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_json(self) -> str:
        """The performance model as a file."""
        return self.profile.model_dump_json(indent=2) + "\n"


# -- the objects of a deployment: the base's, with the graph and the performance model replaced. Pure

GRAPH_KIND = "DynamoGraphDeployment"
PERFORMANCE_MODEL = "ampd-performance-model"
MOST_COMPONENTS = 25
"""Limit of the resource definition of `DynamoGraphDeployment` (v1beta1)."""

_DIGEST = "ampd.dev/configuration"
"""Annotation of pods with a digest of ConfigMaps. A change replaces the pods when the objects are applied again."""


def deployment_objects(deployment: Deployment, base: Sequence[Object]) -> list[Object]:
    """All objects to apply; `base` is not changed.

    Raises:
        UserError: the layout has more groups than a graph may have components.
    """
    model = config_map(PERFORMANCE_MODEL, {MODEL_FILE: deployment.model_json})
    graph = next(entry for entry in base if entry["kind"] == GRAPH_KIND)
    model["metadata"]["labels"] = deepcopy(graph["spec"]["labels"])
    planned = _graph(deployment, graph, {PERFORMANCE_MODEL: model["data"]})
    replaced = {_identity(model), _identity(planned)}
    kept = [deepcopy(entry) for entry in base if _identity(entry) not in replaced]
    _restart_by(kept)
    return [model, *kept, planned]


def _identity(entry: Object) -> tuple[str, str]:
    return entry["kind"], entry["metadata"]["name"]


def _restart_by(objects: Sequence[Object]) -> None:
    """Make a changed configuration restart Redis, because no ConfigMap name has a hash as kustomize's have."""
    data = {entry["metadata"]["name"]: entry["data"] for entry in objects if entry["kind"] == "ConfigMap"}
    for entry in objects:
        if entry["kind"] == "StatefulSet":
            _annotate(entry["spec"]["template"], data)


def _annotate(pod: dict[str, Any], data: Mapping[str, Mapping[str, str]]) -> None:
    digest = hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()[:16]
    pod["metadata"]["annotations"] = {**pod["metadata"].get("annotations", {}), _DIGEST: digest}


def _graph(deployment: Deployment, base: Object, data: Mapping[str, Mapping[str, str]]) -> Object:
    graph = deepcopy(base)
    metadata, spec = graph["metadata"], graph["spec"]
    metadata["annotations"] = {**metadata.get("annotations", {}), **deployment.annotations}
    environment = {"AMPD_TTFT": str(deployment.slo.ttft_s), "AMPD_ITL": str(deployment.slo.itl_s)}
    if deployment.policy_modules:
        environment[MODULES_VARIABLE] = deployment.policy_modules
    spec["env"] = with_environment(spec["env"], environment)
    spec["components"] = _components(deployment, spec["components"], data)
    return graph


def _components(
    deployment: Deployment, base: Sequence[dict[str, Any]], data: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    # Overlays patch components by position: only workers may move.
    shared = [component for component in base if component["type"] not in ("prefill", "decode")]
    coordinator = next(component for component in shared if component["name"] == "coordinator")
    _coordinator(coordinator, deployment)
    workers = _workers(deployment, base)
    for component in (coordinator, *workers):
        _annotate(component["podTemplate"], data)
    count = len(shared) + len(workers)
    if count > MOST_COMPONENTS:
        raise UserError(
            f"--output-manifest: {deployment.layout} makes {count} components, a {GRAPH_KIND} may have "
            f"{MOST_COMPONENTS}; plan with fewer degrees (--degrees)"
        )
    return [*shared, *workers]


def main_container(component: Mapping[str, Any]) -> dict[str, Any]:
    """The container of a component that runs the graph's process."""
    found: dict[str, Any] = next(
        container for container in component["podTemplate"]["spec"]["containers"] if container["name"] == "main"
    )
    return found


def _coordinator(component: dict[str, Any], deployment: Deployment) -> None:
    main = main_container(component)
    main["args"] = with_flags(
        main["args"],
        {
            "--model": deployment.model_path,
            "--model-name": deployment.model_name,
            **{f"--{kind}": deployment.policies[kind] for kind in ("routing", "binding", "pools")},
            "--dyn-tool-call-parser": deployment.tool_call_parser,
            "--dyn-reasoning-parser": deployment.reasoning_parser,
            "--context-length": _text(deployment.context_tokens),
        },
    )


def _workers(deployment: Deployment, components: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_type = {component["type"]: component for component in components}
    # A mixed worker owns sessions. Budgets and network policies treat it as a decode worker.
    templates = {role: by_type["decode" if role is Role.MIXED else role] for role in Role}
    return [
        _group(templates[role], role, tp, count, deployment)
        for role, groups in deployment.layout.groups.items()
        for tp, count in groups
    ]


def _group(template: Mapping[str, Any], role: Role, tp: int, count: int, deployment: Deployment) -> dict[str, Any]:
    """The component of one group of replicas, made from a worker component of the base."""
    component = {**deepcopy(dict(template)), "name": f"{role}-tp{tp}", "replicas": count}
    component["sharedMemorySize"] = shared_memory(tp)
    main = main_container(component)
    kv_format = deployment.kv_cache_dtype
    main["args"] = with_flags(
        main["args"],
        {
            "--role": role,
            "--model": deployment.model_path,
            "--tp": str(tp),
            "--kv-store-gib": store_gib(tp, deployment.store_gib_per_gpu),
            "--ordering": deployment.policies["ordering"],
            "--slicing": deployment.policies["slicing"],
            "--max-total-tokens": _text(deployment.kv_capacity_tokens),
            "--max-context-tokens": _text(deployment.context_tokens),
            "--engine-args": None if kv_format is None else json.dumps({"kv_cache_dtype": kv_format}),
        },
    )
    main["resources"] = resources(tp, deployment.store_gib_per_gpu)
    return component


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


# -- a plan's inputs and expectations as annotations, to compare with the figures of the running graph

PREFIX = "ampd.dev/"


def expectations(
    result: Mapping[str, Any], version: str, model: str | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Annotations of the best layout of a plan's result (the object that `--json` prints).

    `model`, `gpu`: the presets of the plan; None: the names in the performance model. Values are strings, because
    Kubernetes requires it, in the units of their names. Unknown values (ITL if every round has one token) are left out.
    """
    layout, source = result["layouts"][0], result["performance_model"]
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
_DOWNLOADED = f"{MODELS_MOUNT}/qwen3-32b"
"""The model that `k8s/models` downloads."""


def check_flags(settings: PlanSettings) -> None:
    """Refuse wrong flags before the plan is made.

    Raises:
        UserError: as one line.
    """
    if settings.output_manifest is None:
        return
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
        UserError: the manifest cannot be written.
        RunError: there is no layout, or it misses the planned rate and there is no `--force`.
    """
    path = settings.output_manifest
    if path is None:
        return [], []
    if not layouts:
        raise RunError(f"ampd plan: {path} is not written: the plan has no layout")
    planned = result["layouts"][0]
    if not settings.force and (missed := miss(planned)) is not None:
        raise RunError(f"ampd plan: {path} is not written: {missed} (or give --force)")
    deployment = _deployment(settings, layouts[0], model, result)
    warnings = _warnings(deployment, planned)
    warnings += _context_warnings(settings)
    deployment = replace(deployment, annotations=with_warnings(deployment.annotations, warnings))
    title = (
        f"{deployment.layout}: {deployment.layout.gpus} GPUs. The plan's expectations are in the graph's annotations."
    )
    head = [title, *_needs(deployment, Path(path.name)), *(f"WARNING: {warning}" for warning in warnings)]
    objects = deployment_objects(deployment, base_objects())
    beside = {MODEL_FILE: deployment.model_json, PLAN_FILE: json.dumps(dict(result), indent=1) + "\n"}
    if rehearsal := _rehearsal(deployment, objects):
        beside[REHEARSAL_FILE] = "".join(f"{name} = {json.dumps(value)}\n" for name, value in rehearsal.items())
    write_manifest(path, objects, head, beside)
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
            "pools": settings.pools,
            "ordering": settings.ordering,
            "slicing": settings.slicing,
        },
        tool_call_parser=tool_calls,
        reasoning_parser=reasoning,
        kv_capacity_tokens=settings.kv_capacity_tokens,
        context_tokens=settings.context,
        kv_cache_dtype=None if settings.kv_cache_dtype is KvFormat.AUTO else settings.kv_cache_dtype,
        store_gib_per_gpu=settings.kv_store_gib_per_gpu or STORE_GIB_PER_GPU,
        policy_modules=os.environ.get(MODULES_VARIABLE, ""),
        annotations=expectations(result, version("ampd"), preset, settings.gpu),
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
    """Everything that the manifest needs, as commands in their order."""
    image = f"REGISTRY/ampd:{version('ampd')}"
    is_folder = not is_single_file(path)
    volume = "-k k8s/models" if deployment.model_path == _DOWNLOADED else "-f k8s/models/volume.yaml"
    rehearse = [f"To rehearse it here, without GPUs: ampd serve --plan {path}"] if is_folder else []
    return [
        *rehearse,
        "To run it in a namespace of a cluster with Dynamo's operator, in AMPD's repository:",
        f"docker build -t {image} -f k8s/Dockerfile . && docker push {image}  # `images:` of an overlay names it",
        *SECRETS,
        f"kubectl apply {volume}  # or another claim `ampd-models`; the model is expected in {deployment.model_path}",
        f"kubectl apply -{'k' if is_folder else 'f'} {path}",
    ]


def _rehearsal(deployment: Deployment, objects: Sequence[Object]) -> dict[str, str | int | float]:
    """Settings of `ampd serve` for the same layout with the modelled engine; empty if it has none for it, because the
    replicas of one role have several degrees."""
    groups = deployment.layout.groups
    if any(len(replicas) > 1 for replicas in groups.values()):
        return {}
    graph = next(entry for entry in objects if entry["kind"] == GRAPH_KIND)
    coordinators = next(each["replicas"] for each in graph["spec"]["components"] if each["name"] == "coordinator")
    workers: dict[str, str | int | float] = {str(role): 0 for role in Role}
    for role, ((degree, count),) in groups.items():
        workers |= {str(role): count, f"{role}_tp": degree}
    return {
        "engine": "modelled",
        "model_name": deployment.model_name,
        **workers,
        "coordinators": coordinators,
        "ttft": deployment.slo.ttft_s,
        "itl": deployment.slo.itl_s,
        **deployment.policies,
    }


def _context_warnings(settings: PlanSettings) -> list[str]:
    own_tokens = model_shape(settings.model).max_context_tokens if settings.model else settings.context
    if settings.context is None or own_tokens is None or settings.context <= own_tokens:
        return []
    return [
        f"contexts of {settings.context} tokens are longer than the {own_tokens} of the model's config.json; the "
        "workers need its rope scaled, as with json_model_override_args in --engine-args"
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
