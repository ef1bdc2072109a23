"""The objects of a planned deployment: those of the base, with the graph and the performance model replaced. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ampd.errors import UserError
from ampd.perf.profile import PerformanceProfile
from ampd.policies.registry import MODULES_VARIABLE
from ampd.types import Role, Slo
from planner.layout.layout import Layout
from planner.manifest.files import Object, config_map

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
STORE_GIB_PER_GPU = 64.0
"""For the KV of sessions: about the KV memory of a GPU of 141 GB with a 32B model."""
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
        store_gib_per_gpu: size of the KV stores.
        policy_modules: `AMPD_POLICY_MODULES` of the plan; empty: none.
        image: None leaves the base's.
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
    store_gib_per_gpu: float = STORE_GIB_PER_GPU
    policy_modules: str = ""
    image: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)


# -- the objects of a deployment: the base's, with the graph and the performance model replaced. Pure

GRAPH_KIND = "DynamoGraphDeployment"
PERFORMANCE_MODEL = "ampd-performance-model"
MOST_COMPONENTS = 25
"""Limit of the resource definition of `DynamoGraphDeployment` (v1beta1)."""

_MODEL_KEY = "model.json"
_DIGEST = "ampd.dev/configuration"
"""Annotation of pods with a digest of ConfigMaps. A change replaces the pods when the objects are applied again."""


def deployment_objects(deployment: Deployment, base: Sequence[Object]) -> list[Object]:
    """All objects to apply; `base` is not changed.

    Raises:
        UserError: the layout has more groups than a graph may have components.
    """
    model = config_map(PERFORMANCE_MODEL, {_MODEL_KEY: deployment.profile.model_dump_json(indent=2) + "\n"})
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
    if deployment.image is not None:
        for component in spec["components"]:
            main_container(component)["image"] = deployment.image
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
            **{f"--{kind}": policy for kind, policy in deployment.policies.items()},
            "--dyn-tool-call-parser": deployment.tool_call_parser,
            "--dyn-reasoning-parser": deployment.reasoning_parser,
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
    tokens = deployment.kv_capacity_tokens
    main["args"] = with_flags(
        main["args"],
        {
            "--role": role,
            "--model": deployment.model_path,
            "--tp": str(tp),
            "--kv-store-gib": store_gib(tp, deployment.store_gib_per_gpu),
            "--ordering": deployment.policies["ordering"],
            "--slicing": deployment.policies["slicing"],
            "--max-total-tokens": None if tokens is None else str(tokens),
        },
    )
    main["resources"] = resources(tp, deployment.store_gib_per_gpu)
    return component
