"""What a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import ATTAINMENT, Slo
from planner.layout.layout import Layout
from planner.simulator.cluster import Cluster
from planner.simulator.options import Policies, SimulationOptions
from workloads.trace import Session


@dataclass(frozen=True, slots=True)
class PlanCase:
    """What to plan for.

    Attributes:
        rate: sessions per second.
        kv_capacity_tokens: KV memory of a replica by degree; 0: unlimited.
        kv_store_tokens: host memory of a replica's KV store by degree; empty: no stores.
        attainment: share of the rounds within both targets that counts as carrying a rate.
    """

    sessions: tuple[Session, ...]
    rate: float
    slo: Slo
    model: PiecewiseModel
    kv_capacity_tokens: dict[int, int]
    gpus: int
    routing: str
    ordering: str
    slicing: str
    options: SimulationOptions
    kv_store_tokens: dict[int, int] = field(default_factory=dict)
    attainment: float = ATTAINMENT

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted(self.kv_capacity_tokens))

    def cluster_of(self, layout: Layout) -> Cluster:
        """The simulated cluster of a layout."""
        return layout.cluster(self.kv_capacity_tokens, self.model.profile.max_context_tokens or 0, self.kv_store_tokens)

    def new_policies(self) -> Policies:
        """The online policies of one simulation. Some remember what they have seen, so each simulation has its own."""
        return Policies(
            create_named("binding", defaults.BINDING),
            create_named("routing", self.routing),
            create_named("ordering", self.ordering),
            create_named("slicing", self.slicing),
        )
