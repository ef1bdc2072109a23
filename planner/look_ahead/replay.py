"""What a set of roles would have made of a recorded load: one short simulation."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import sqrt

from ampd.policies import defaults
from ampd.policies.base import OtherPolicies, PoolsSituation
from ampd.policies.registry import BINDING, ORDERING, ROUTING, SLICING
from ampd.types import Role
from planner.look_ahead.candidates import Roles
from planner.look_ahead.recorded import RecordedLoad
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.simulate import simulate
from workloads.results import meets


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of one replay.

    Attributes:
        met: (session id, number) of the rounds that met their targets.
        share: the mean of two shares: of the rounds, and of the sessions whose rounds all met them.
    """

    met: AbstractSet[tuple[str, int]]
    share: float

    def is_better_than(self, other: Replay, gain: float) -> bool:
        """Whether its share is higher by `gain`, and not by chance.

        Both served the same rounds, so only rounds that just one of them met count. Chance would divide these evenly;
        the difference must be two standard deviations (McNemar's test).
        """
        won, lost = len(self.met - other.met), len(other.met - self.met)
        return self.gains(other, gain) and won - lost >= 2 * sqrt(won + lost)

    def gains(self, other: Replay, gain: float) -> bool:
        """Whether its share is higher by `gain`, be it by chance."""
        return self.share >= other.share + gain


def replay(recorded: RecordedLoad, roles: Roles, situation: PoolsSituation) -> Replay:
    """Serve a recorded load with the workers in these roles."""
    groups: dict[Role, list[ReplicaGroup]] = {role: [] for role in Role}
    for view in situation.workers:
        group = ReplicaGroup(1, view.parallelism, view.kv_capacity_tokens, view.store_capacity_tokens)
        groups[roles[view.worker_id]].append(group)
    slo = situation.slo
    # The last rounds have the time in which they can still meet their targets. What goes on later has missed them.
    until_s = recorded.span_s + slo.ttft_s + 2 * slo.itl_s * recorded.mean_output_tokens
    done = simulate(
        recorded.sessions,
        Cluster(
            decode=tuple(groups[Role.DECODE]), prefill=tuple(groups[Role.PREFILL]), mixed=tuple(groups[Role.MIXED])
        ),
        situation.model,
        _policies(situation.others),
        slo,
        SimulationOptions(moves=situation.others.moves, contexts=recorded.contexts, until_s=until_s),
    )
    met = {(record.session_id, record.index) for record in done.rounds if meets(record, slo)}
    whole = sum(
        all((session.session_id, index) in met for index in range(len(session.rounds))) for session in recorded.sessions
    )
    return Replay(met, (len(met) / recorded.rounds + whole / len(recorded.sessions)) / 2)


def _policies(others: OtherPolicies) -> Policies:
    return Policies(
        others.binding or BINDING.create_named(defaults.BINDING),
        others.routing or ROUTING.create_named(defaults.ROUTING),
        others.ordering or ORDERING.create_named(defaults.ORDERING),
        others.slicing or SLICING.create_named(defaults.SLICING),
    )
