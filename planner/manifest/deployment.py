"""What is deployed: a planned layout with everything that the processes must be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampd.perf.profile import PerformanceProfile
from ampd.types import Slo
from planner.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of the graph, as they are written on command lines."""

    routing: str
    binding: str
    pools: str
    ordering: str
    slicing: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A layout and how it is to serve.

    Attributes:
        policies: with paths as they are inside the containers.
        model_path: folder of the model inside the containers.
        model_name: what clients call it.
        tool_call_parser, reasoning_parser: names of Dynamo's parsers for the model; None: it has none.
        profile: the performance model that was planned with.
        kv_capacity_tokens: KV memory that every replica is limited to; None: what fits.
        policy_modules: `AMPD_POLICY_MODULES` that the plan ran with; empty: none.
        image: None leaves the base's.
        annotations: what the plan expects, for the deployment itself.
    """

    layout: Layout
    model_path: str
    model_name: str
    profile: PerformanceProfile
    slo: Slo
    policies: Policies
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    kv_capacity_tokens: int | None = None
    policy_modules: str = ""
    image: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
