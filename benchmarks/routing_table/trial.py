"""Judges a routing table: how many rounds meet both targets with it, and which of its cells rounds came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampd_rivals.ppd.table import TableRouting

from ampd.policies.base import RoutingPolicy, RoutingSituation
from ampd.policies.registry import create_named
from ampd.types import RouteDecision
from benchmarks.routing_table.case import FitCase
from planner.simulator.options import Policies
from planner.simulator.simulate import simulate
from workloads.results import meets
from workloads.trace import Session


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a table: rounds that met both targets, and the cells that rounds came by."""

    attained: int
    cells: frozenset[int]


@dataclass(slots=True)
class _Watched:
    """A table's policy that notes the cells it looks up."""

    policy: TableRouting
    cells: set[int] = field(default_factory=set)

    def route(self, situation: RoutingSituation) -> RouteDecision:
        decision = self.policy.route(situation)
        if decision.estimates:
            self.cells.add(self.policy.cell(situation.task, decision.estimates))
        return decision


def try_table(case: FitCase, workloads: Sequence[Sequence[Session]], policy: TableRouting) -> Trial:
    """Simulate every workload with a table."""
    watched = _Watched(policy)
    return Trial(rounds_attained(case, workloads, watched), frozenset(watched.cells))


def rounds_attained(case: FitCase, workloads: Sequence[Sequence[Session]], routing: RoutingPolicy) -> int:
    """Rounds of all workloads that meet both targets. Rounds that are never sent meet none."""
    policies = Policies(
        create_named("binding", case.binding),
        routing,
        create_named("ordering", case.ordering),
        create_named("slicing", case.slicing),
    )
    runs = [simulate(workload, case.cluster, case.model, policies, case.slo, case.options) for workload in workloads]
    return sum(meets(record, case.slo) for run in runs for record in run.rounds)
