"""A planned layout with all settings of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampd.perf.profile import PerformanceProfile
from ampd.types import Slo
from planner.layout.layout import Layout
from planner.manifest.replica import STORE_GIB_PER_GPU


@dataclass(frozen=True, slots=True)
class PolicyNames:
    """The policies of the graph, as written on command lines."""

    routing: str
    binding: str
    pools: str
    ordering: str
    slicing: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A layout and how it serves.

    Attributes:
        policies: paths in them are inside the containers.
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
    policies: PolicyNames
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    kv_capacity_tokens: int | None = None
    store_gib_per_gpu: float = STORE_GIB_PER_GPU
    policy_modules: str = ""
    image: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
