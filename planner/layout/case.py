"""What a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import ATTAINMENT, Parallelism, Slo
from planner.layout.layout import Layout
from planner.layout.population import Population
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies, SimulationOptions
from workloads.trace import Session


@dataclass(frozen=True)
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

    @cached_property
    def population(self) -> Population:
        """Its sessions as a population."""
        return Population.of(self.sessions, self.slo)

    def cluster_of(self, layout: Layout) -> Cluster:
        """The simulated cluster of a layout."""
        kv_tokens, store_tokens = self.kv_capacity_tokens, self.kv_store_tokens
        decode, prefill, mixed = (
            tuple(ReplicaGroup(count, Parallelism(n), kv_tokens[n], store_tokens.get(n, 0)) for n, count in replicas)
            for replicas in (layout.decode, layout.prefill, layout.mixed)
        )
        return Cluster(decode, prefill, self.model.profile.max_context_tokens or 0, mixed)

    def new_policies(self) -> Policies:
        """The online policies of one simulation. Some remember what they have seen, so each simulation has its own."""
        return Policies(
            create_named("binding", defaults.BINDING),
            create_named("routing", self.routing),
            create_named("ordering", self.ordering),
            create_named("slicing", self.slicing),
        )
