"""Compares sets of roles: how well each would serve the recorded load, by short simulations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import sqrt

from ampd.perf.model import PerformanceModel
from ampd.policies import defaults
from ampd.policies.base import OtherPolicies, PoolsSituation
from ampd.policies.considered import TriedRoles
from ampd.policies.estimates import queued_s
from ampd.policies.registry import BINDING, ORDERING, ROUTING, SLICING
from ampd.types import Parallelism, Role, WorkerView
from planner.look_ahead.recorded import Decoding, RecordedLoad
from planner.simulator.options import Cluster, Policies, ReplicaGroup, SimulationOptions
from planner.simulator.outcome import SimulatedRound
from planner.simulator.simulate import simulate
from workloads.results import meets

Roles = Mapping[str, Role]
"""Worker id -> its role."""
Shape = frozenset[tuple[tuple[Parallelism, Role], int]]
"""What makes two sets of roles equal."""

_DEVIATIONS = 3.0
"""A gain must be this many standard deviations. A wrong change costs more than a late one: it takes a while to notice,
and then the roles rest for a while."""
_SUPPORTED = 1.0
"""This many deviations fewer are enough if a rule of thumb wants the same change, as a second, independent sign."""
_OUTWEIGHS = 4.0
"""A gain of the latest rounds counts although the longer record shows a loss, if it is this many times as many
rounds. After a change of the load, most of the longer record is about the load before."""
_DOUBTFUL = 2
"""Sets of roles that serve more rounds where chance hides a gain."""


# -- the sets of roles


def candidate_roles(workers: Sequence[WorkerView], model: PerformanceModel) -> Iterator[Roles]:
    """The present roles; one worker (of each parallelism), or a quarter of them, changed either way; all decoding.

    If all decode, that is co-located serving. Of the decode and mixed workers, those with the least KV of sessions
    change first. Of the prefill workers, those with the shortest queue change first. Sets that differ only in workers
    of equal parallelism count as one.
    """
    now = {view.worker_id: view.role for view in workers}
    owners = sorted((view for view in workers if view.role.owns_sessions), key=_held_tokens)
    prefill = sorted(
        (view for view in workers if view.role is Role.PREFILL),
        key=lambda view: (queued_s(view, model), view.worker_id),
    )
    quarter = max(len(workers) // 4, 2)
    tried: list[Roles] = [now]
    tried += [now | _all([view], Role.PREFILL) for view in _first_of_each(owners)]
    tried += [now | _all([view], Role.DECODE) for view in _first_of_each(prefill)]
    tried += [now | _all(owners[:quarter], Role.PREFILL), now | _all(prefill[:quarter], Role.DECODE)]
    tried.append(_all(workers, Role.DECODE))
    seen: set[Shape] = set()
    for roles in tried:
        if (found := shape(workers, roles)) not in seen and any(role.owns_sessions for role in roles.values()):
            seen.add(found)
            yield roles


def shape(workers: Sequence[WorkerView], roles: Roles) -> Shape:
    """How many workers of each parallelism have each role."""
    return frozenset(Counter((view.parallelism, roles[view.worker_id]) for view in workers).items())


def in_words(roles: Roles) -> str:
    """As `2 prefill, 6 decode`."""
    count = Counter(roles.values())
    return ", ".join(f"{count[role]} {role.value}" for role in Role if count[role])


def _first_of_each(views: Sequence[WorkerView]) -> list[WorkerView]:
    """The first one of each parallelism."""
    return list({view.parallelism: view for view in reversed(views)}.values())


def _all(workers: Sequence[WorkerView], role: Role) -> dict[str, Role]:
    return {view.worker_id: role for view in workers}


def _held_tokens(view: WorkerView) -> tuple[int, str]:
    return sum(view.held_tokens.values()), view.worker_id


# -- one simulation


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
        return self.gains(other, gain) and self.more_rounds(other) >= deviations * sqrt(len(self.met ^ other.met))

    def more_rounds(self, other: Replay) -> int:
        """How many rounds more it met than the other one; below 0: fewer."""
        return len(self.met) - len(other.met)

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
        if record.session_id in recorded.counted
        and meets(_whole(record, recorded.decoding.get(record.session_id)), slo)
    }
    whole = sum(all((session.session_id, index) in met for index in range(len(session.rounds))) for session in counted)
    return Replay(met, (len(met) / recorded.rounds + whole / len(counted)) / 2)


def _whole(record: SimulatedRound, before: Decoding | None) -> SimulatedRound:
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


# -- the comparison


@dataclass(frozen=True, slots=True)
class Outlook:
    """The outcomes of two replays with the same roles.

    Attributes:
        soon: replay of the latest rounds, behind the rounds that are in progress. It shows what a change costs at
            first.
        later: replay of a longer record, from an empty cluster. It shows what the roles are worth when a change is
            over. None: `soon` was so bad that this replay was left out.
    """

    soon: Replay
    later: Replay | None

    @property
    def share(self) -> float:
        """The mean share of both replays."""
        return self.soon.share if self.later is None else (self.soon.share + self.later.share) / 2

    @property
    def worst(self) -> float:
        """The lower share of the two replays. A higher share that the record proves counts instead of a replay's."""
        both = [self.soon] if self.later is None else [self.soon, self.later]
        return min(max(each.share, each.proven) for each in both)

    def is_better_than(self, other: Outlook, gain: float, *, is_supported: bool = False) -> bool:
        """Whether one of the two replays is better by `gain` and not by chance, and neither is worse by `gain`.

        `later` may be worse if `soon` gains many more rounds than `later` loses.

        Args:
            is_supported: a rule of thumb prefers these roles too.
        """
        if self.later is None or other.soon.gains(self.soon, gain):
            return False
        if other.later is None:
            return True
        lost = other.later.more_rounds(self.later)
        if other.later.gains(self.later, gain) and self.soon.more_rounds(other.soon) < _OUTWEIGHS * lost:
            return False
        deviations = _DEVIATIONS - (_SUPPORTED if is_supported else 0.0)
        return self.later.is_better_than(other.later, gain, deviations) or self.soon.is_better_than(
            other.soon, gain, deviations
        )

    def gains(self, other: Outlook, gain: float) -> bool:
        """Whether one of the two replays is better by `gain`, even if by chance, and even if the other is worse."""
        if self.later is None or other.later is None:
            return self.soon.gains(other.soon, gain)
        return self.soon.gains(other.soon, gain) or self.later.gains(other.later, gain)

    def surely_meets_more_than(self, other: Outlook) -> bool:
        """Whether it meets more rounds in both replays together, by two standard deviations."""
        pairs = [(self.soon, other.soon)]
        if self.later is not None and other.later is not None:
            pairs.append((self.later, other.later))
        more = sum(mine.more_rounds(theirs) for mine, theirs in pairs)
        return more > 0 and more >= 2 * sqrt(sum(len(mine.met ^ theirs.met) for mine, theirs in pairs))


class Comparison:
    """Outlooks of sets of roles.

    Args:
        now: the present roles.
        supported: roles that a rule of thumb prefers, or the present ones.
        soon, later: the loads that are served again.
        gain: least difference of attainment that counts.
        proven: what the present roles attained by the record in the time of `later`.

    Attributes:
        present: the outlook of the present roles.
    """

    def __init__(
        self,
        situation: PoolsSituation,
        now: Roles,
        supported: Roles,
        soon: RecordedLoad,
        later: RecordedLoad,
        gain: float,
        proven: float = 0.0,
    ) -> None:
        self._situation = situation
        self._now = now
        self._supported = shape(situation.workers, supported)
        self._soon = soon
        self._later = later
        self._gain = gain
        self._others: list[tuple[Roles, Outlook]] = []
        self._left_out: list[tuple[Roles, Outlook]] = []
        self._proven = proven
        self.present = Outlook(replay(soon, now, situation), self._again(later))
        self._known = {shape(situation.workers, now): self.present}

    def outlook(self, roles: Roles) -> Outlook:
        """Serve the latest rounds with these roles, and the longer record unless the latest rounds rule them out."""
        key = shape(self._situation.workers, roles)
        if key not in self._known:
            soon = replay(self._soon, roles, self._situation)
            is_out = self.present.soon.gains(soon, self._gain)
            self._known[key] = Outlook(soon, None if is_out else replay(self._later, roles, self._situation))
        return self._known[key]

    def has_served(self, roles: Roles) -> bool:
        """Whether the loads were served with these roles already."""
        return shape(self._situation.workers, roles) in self._known

    def try_all(self, others: Iterable[Roles]) -> None:
        """Compare these roles too."""
        self._others += [(roles, self.outlook(roles)) for roles in others]

    def best(self) -> Roles | None:
        """The best of the roles that are better than the present ones; None: no roles are better."""
        better = [item for item in self._others if self._is_better(*item)]
        return max(better, key=lambda item: item[1].share)[0] if better else None

    @property
    def is_doubtful(self) -> bool:
        """Whether no roles are better, but some gain enough, perhaps by chance."""
        return self.best() is None and bool(self._gaining())

    def serve_more(self, later: RecordedLoad) -> None:
        """Compare the present roles with those that gain most once more, with more rounds."""
        doubtful = sorted(self._gaining(), key=lambda item: -item[1].share)[:_DOUBTFUL]
        self._left_out = [item for item in self._others if item not in doubtful]
        self.present = Outlook(self.present.soon, self._again(later))
        self._others = [(roles, Outlook(each.soon, replay(later, roles, self._situation))) for roles, each in doubtful]

    def tried(self) -> list[TriedRoles]:
        """The sets of roles that were tried, for logs. The present roles come first."""
        tried = [TriedRoles(in_words(self._now), self.present.share, is_now=True)]
        return tried + [TriedRoles(in_words(roles), each.share) for roles, each in self._others + self._left_out]

    def _again(self, later: RecordedLoad) -> Replay:
        """Replay `later` with the present roles. It was recorded with them, so what they attained is proven."""
        return replace(replay(later, self._now, self._situation), proven=self._proven)

    def _is_better(self, roles: Roles, outlook: Outlook) -> bool:
        is_supported = shape(self._situation.workers, roles) == self._supported
        return outlook.is_better_than(self.present, self._gain, is_supported=is_supported)

    def _gaining(self) -> list[tuple[Roles, Outlook]]:
        """The roles that more rounds may show to be better: `later` was replayed, and one of the two replays gains."""
        return [item for item in self._others if item[1].later is not None and item[1].gains(self.present, self._gain)]
