"""What a plan is made for, and what it decides: replicas per phase and degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ampd.perf.piecewise import PiecewiseModel
from ampd.policies import defaults
from ampd.policies.registry import create_named
from ampd.types import ATTAINMENT, Parallelism, Role, Slo
from planner.layout.population import Population
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from workloads.trace import Session

Replicas = tuple[tuple[int, int], ...]
"""(degree, replicas) in ascending order of degree, without zeros."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Replicas of each tensor-parallel degree by role. With decode replicas only, the layout is co-located."""

    prefill: Replicas
    decode: Replicas
    mixed: Replicas = ()

    @property
    def groups(self) -> Mapping[Role, Replicas]:
        """The replicas by role, without roles that have none."""
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        return {role: replicas for role, replicas in named.items() if replicas}

    @property
    def gpus(self) -> int:
        return sum(degree * replicas for group in self.groups.values() for degree, replicas in group)

    def as_dict(self) -> dict[str, Any]:
        """The layout in the form of a plan's result. Mixed replicas are listed only if there are any."""
        always = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {
            str(role): [{"tp": degree, "replicas": count} for degree, count in replicas]
            for role, replicas in (always | dict(self.groups)).items()
        } | {"gpus": self.gpus}

    def __str__(self) -> str:
        return layout_label(self.as_dict())


def layout_label(row: Mapping[str, Any]) -> str:
    """A layout of a plan's result as text: `prefill 2xTP4+1xTP8, decode 2xTP4`, or `co-located 2xTP4`."""
    groups = {role: "+".join(f"{group['replicas']}xTP{group['tp']}" for group in row.get(role, ())) for role in Role}
    if not groups[Role.PREFILL] and not groups[Role.MIXED]:
        return f"co-located {groups[Role.DECODE]}"
    return ", ".join(f"{role} {text}" for role, text in groups.items() if text)


def replicas_of(counts: Mapping[int, int]) -> Replicas:
    return tuple((degree, counts[degree]) for degree in sorted(counts) if counts[degree])


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
    pools: str
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
            create_named("pools", self.pools),
        )
