"""How a set of roles would have served a recorded load: one short simulation."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import sqrt

from ampd.policies import defaults
from ampd.policies.base import OtherPolicies, PoolsSituation
from ampd.policies.registry import BINDING, ORDERING, ROUTING, SLICING
from ampd.types import Role
from planner.look_ahead.candidates import Roles
from planner.look_ahead.recorded import Decoded, RecordedLoad
from planner.simulator.cluster import Cluster, ReplicaGroup
from planner.simulator.options import Policies, SimulationOptions
from planner.simulator.outcome import SimulatedRound
from planner.simulator.simulate import simulate
from workloads.results import meets


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of one replay.

    Attributes:
        met: (session id, number) of the rounds that met their targets.
        share: the mean of two shares: of the rounds, and of the sessions whose rounds all met them.
        proven: the share that these roles attained by the record, if they are the present roles. If the replay attains
            less, the replay is wrong, and other roles have to beat this share.
    """

    met: AbstractSet[tuple[str, int]]
    share: float
    proven: float = 0.0

    def is_better_than(self, other: Replay, gain: float, deviations: float = 2.0) -> bool:
        """Whether its share is higher by `gain`, and not by chance.

        Both replays served the same rounds, so only rounds count that exactly one of the two met. Chance would divide
        these rounds evenly. The difference must be `deviations` standard deviations (McNemar's test).
        """
        won, lost = len(self.met - other.met), len(other.met - self.met)
        return self.gains(other, gain) and won - lost >= deviations * sqrt(won + lost)

    def more_rounds(self, other: Replay) -> int:
        """How many rounds more it met than the other one; below 0: fewer."""
        return len(self.met - other.met) - len(other.met - self.met)

    def gains(self, other: Replay, gain: float) -> bool:
        """Whether its share is higher by `gain`, even if by chance."""
        return self.share >= max(other.share, other.proven) + gain


def replay(recorded: RecordedLoad, roles: Roles, situation: PoolsSituation) -> Replay:
    """Serve a recorded load with the workers in these roles."""
    groups: dict[Role, list[ReplicaGroup]] = {role: [] for role in Role}
    names: dict[str, str] = {}
    for view in situation.workers:
        group = ReplicaGroup(1, view.parallelism, view.kv_capacity_tokens, view.store_capacity_tokens)
        role = roles[view.worker_id]
        names[view.worker_id] = f"{role}-{len(groups[role])}"
        groups[role].append(group)
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
        SimulationOptions(
            moves=situation.others.moves,
            hand_over_pass=situation.others.hand_over_pass,
            under_way={
                session_id: replace(begun, owner=names.get(begun.owner, ""), prefill=names.get(begun.prefill, ""))
                for session_id, begun in recorded.under_way.items()
            },
            until_s=until_s,
        ),
    )
    counted = [session for session in recorded.sessions if session.session_id in recorded.counted]
    met = {
        (record.session_id, record.index)
        for record in done.rounds
        if record.session_id in recorded.counted and meets(_whole(record, recorded.decoded.get(record.session_id)), slo)
    }
    whole = sum(all((session.session_id, index) in met for index in range(len(session.rounds))) for session in counted)
    return Replay(met, (len(met) / recorded.rounds + whole / len(counted)) / 2)


def _whole(record: SimulatedRound, before: Decoded | None) -> SimulatedRound:
    """The round with the ITL of all its tokens, also of those before the replay."""
    if before is None or record.itl_s is None:
        return record
    tokens = before.tokens + record.output_tokens - 1
    return replace(record, itl_s=(before.tokens * before.token_s + (record.output_tokens - 1) * record.itl_s) / tokens)


def _policies(others: OtherPolicies) -> Policies:
    return Policies(
        others.binding or BINDING.create_named(defaults.BINDING),
        others.routing or ROUTING.create_named(defaults.ROUTING),
        others.ordering or ORDERING.create_named(defaults.ORDERING),
        others.slicing or SLICING.create_named(defaults.SLICING),
    )
