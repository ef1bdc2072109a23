"""Our pools with a look ahead: other roles are simulated with the recent load before they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.considered import Considered, TriedRoles
from ampd.policies.estimates import index_of_least, queued_s
from ampd.policies.pools.predictive import KV_SHORT, PredictivePools
from ampd.policies.registry import Policy, register
from ampd.recent_load import Load, all_rounds, latest_rounds, rounds_since
from ampd.types import Role

if TYPE_CHECKING:
    from planner.look_ahead.candidates import Roles
    from planner.look_ahead.recorded import RecordedLoad


@register("pools", "look-ahead")
class LookAheadPools(Policy):
    """Serve the recent load again in the simulator, under other roles, and take the roles that serve it best. Where KV
    memory is short, which a replay of minutes does not show, change what `predictive` changes.

    Reads: the rounds of the last five minutes (arrival, prompt, history, output, whether they met their targets);
    the workers' parallelism, memory, queues and sessions; the performance model; the targets; the graph's other
    policies.

    Rule: attainment is the mean of the shares of rounds, and of sessions in all their rounds, that met the targets.

    1. It is asked every 5 s, but not within 15 s of a change. Other roles are tried when the last 30 s attained 97
       % or less, or when `predictive` would change a role.
    2. Each set of roles is simulated twice. *Soon*: the rounds of the last 15 s come again, behind the rounds that
       are in progress now. *Later*: 100 rounds of each worker come again, in an empty cluster.
    3. The sets of roles are the present one, one worker and a quarter of the workers moved either way, and all
       workers decoding. Roles with fewer owners are not tried where the sessions' KV would take more than 40 % of
       their memory.
    4. Roles are better if they attain 2 points more than the present ones, soon or later (up to 4 if the policy
       answers slowly), if this is not chance (three standard deviations; two for a change that `predictive` would
       make too), and if they lose 2 points in neither, except later where they win four times as many rounds soon.
       Later they also have to beat what the present roles really attained. If a gain may be chance, more rounds are
       simulated.
    5. If no roles are taken, and the sessions' KV takes more than 80 % of the decode workers' memory, or more
       than 50 % and would take 80 % after 150 s of the same growth, a prefill worker becomes a decode worker
       (`kv-short`), unless the replays show a loss.
    6. If no worker owns sessions, because the last one is lost, it does what `predictive` does.

    Limits: it knows only the load that came, without rounds that were refused or given up, and of the rounds in
    progress only those of the leading coordinator. No worker becomes mixed. A look takes a second or more of one
    core, in a process of its own.

    Example: `--pools look-ahead`
    """

    interval_s: ClassVar[float] = 5.0
    load_s: ClassVar[float] = 300.0
    is_slow: ClassVar[bool] = True

    CONTENT: ClassVar[float] = 0.97
    """Attainment above which no other roles are tried."""
    GAIN: ClassVar[float] = 0.02
    """Least gain of attainment for which roles change."""
    MOST_GAINS: ClassVar[float] = 2.0
    """How many times as much roles must gain at most, where the policy rests for long."""
    COOLDOWN_S: ClassVar[float] = 15.0
    """Least time between two changes."""
    ROUNDS_PER_WORKER: ClassVar[int] = 100
    """Rounds of the longer record, per worker."""
    FULL: ClassVar[float] = 0.5
    """Share of the KV memory above which one worker more owns sessions if the sessions grow."""
    STRESS: ClassVar[float] = 1.0
    """How many times as short arrivals and pauses are made."""

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        if not any(view.role.owns_sessions for view in situation.workers):
            return _RULE.change(situation)  # every round fails, and a replay could tell no more
        if situation.changed_within(self.COOLDOWN_S):
            return ()
        for_memory, by_rule = self._for_memory(situation), _RULE.change(situation)
        # Roles under which targets are met could only become worse, whatever a replay says alone.
        is_due = bool(by_rule) or self._misses(situation)
        return self._look(situation, by_rule, for_memory, is_due) if for_memory or is_due else ()

    def _for_memory(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        """A prefill worker becomes a decode worker if the sessions' KV fills the memory, or will."""
        from planner.look_ahead.memory import sessions_share, will_be_short

        prefill = [view for view in situation.workers if view.role is Role.PREFILL]
        owners = [view for view in situation.workers if view.role.owns_sessions]
        share = sessions_share(owners, owners)
        if not prefill or share <= self.FULL:
            return ()
        if share <= _RULE.FULL and not will_be_short(situation, owners, _RULE.FULL):
            return ()
        chosen = prefill[index_of_least([queued_s(view, situation.model) for view in prefill], situation.rng)]
        return (RoleChange(chosen.worker_id, Role.DECODE, KV_SHORT),)

    def _misses(self, situation: PoolsSituation) -> bool:
        """Whether too many rounds miss their targets, or few rounds of too many sessions."""
        from planner.look_ahead.attained import attained

        for last_s in (_RECENT_S, self.load_s):
            share = attained(situation, situation.now_s - last_s, _LEAST_ROUNDS)
            if share is not None:
                return share <= self.CONTENT
        return False

    def _look(
        self, situation: PoolsSituation, by_rule: Sequence[RoleChange], for_memory: Sequence[RoleChange], is_due: bool
    ) -> Sequence[RoleChange]:
        # Every process of a graph imports all policies. Only the one that looks needs the simulator.
        from planner.look_ahead.candidates import candidate_roles, in_words
        from planner.look_ahead.comparison import Comparison
        from planner.look_ahead.present import present_state
        from planner.look_ahead.recorded import recorded_load

        now, *others = candidate_roles(situation.workers, situation.model)
        others = [roles for roles in others if is_due and _has_memory(situation, roles)]
        if not others and not for_memory:
            return ()
        latest, longer = self._records(situation)
        lengths = rounds_since(situation.load, _oldest_s(situation))
        soon = recorded_load(latest, self.STRESS, present_state(situation), lengths)
        later = recorded_load(longer, self.STRESS, outputs=lengths)
        if not later.rounds:
            return for_memory

        proven, gain = _proven(situation, longer), self._gain(situation)
        comparison = Comparison(situation, now, _changed(now, by_rule), soon, later, gain, proven)
        present, rounds = comparison.present, later.rounds
        if present.worst <= 1 - gain:
            comparison.try_all(others)
        if comparison.is_doubtful and (more := self._more_rounds(situation, rounds)):
            rounds = more.rounds
            comparison.serve_more(more)
        best, is_chance = comparison.best(), comparison.is_doubtful
        changes = () if best is None else _changes(now, best)
        tried = comparison.tried()
        if for_memory and not changes:
            roles = _changed(now, for_memory)
            is_listed, with_more = comparison.has_served(roles), comparison.outlook(roles)
            if not is_listed:
                tried.append(TriedRoles(in_words(roles), with_more.share))
            if not (present.gains(with_more, gain) or present.surely_meets_more_than(with_more)):
                changes, is_chance = for_memory, False
        return Considered(changes, tried, rounds, is_chance=is_chance)

    def _gain(self, situation: PoolsSituation) -> float:
        return self.GAIN * min(max(situation.rest_s / self.COOLDOWN_S, 1.0), self.MOST_GAINS)

    def _more_rounds(self, situation: PoolsSituation, rounds: int) -> RecordedLoad | None:
        """A record that is longer than `rounds`; None: no record would tell much more."""
        from planner.look_ahead.recorded import recorded_load

        more = recorded_load(latest_rounds(situation.load, min(_MORE * rounds, _MOST_ROUNDS)), self.STRESS)
        return more if more.rounds >= _LEAST_MORE * rounds else None

    def _records(self, situation: PoolsSituation) -> tuple[Load, Load]:
        """The latest rounds, and a longer record that has them too."""
        latest = rounds_since(situation.load, situation.now_s - _LATEST_S)
        most, count = self.ROUNDS_PER_WORKER * len(situation.workers), sum(map(len, latest.values()))
        least = min(_LEAST_ROUNDS_PER_WORKER * len(situation.workers), most)
        return (
            latest_rounds(situation.load, min(max(least, count), _MOST_ROUNDS)),
            latest_rounds(situation.load, min(max(most, count), _MOST_ROUNDS)),
        )


def _oldest_s(situation: PoolsSituation) -> float:
    """When the oldest round in progress was sent, or the latest rounds began, whichever is earlier."""
    in_progress = [item.sent_s for item in all_rounds(situation.load) if item.ended_s is None]
    return min([situation.now_s - _LATEST_S, *in_progress])


def _proven(situation: PoolsSituation, load: Load) -> float:
    """What the present roles attained in the time of a load, since they were assigned."""
    from planner.look_ahead.attained import attained

    first_s = min((item.sent_s for item in all_rounds(load)), default=situation.now_s)
    return attained(situation, max(first_s, situation.changed_s)) or 0.0


def _changed(now: Roles, changes: Sequence[RoleChange]) -> Roles:
    """The roles after changes."""
    return dict(now) | {change.worker_id: change.role for change in changes}


def _changes(now: Roles, best: Roles) -> Sequence[RoleChange]:
    """From the present roles to the best ones."""
    changes = [RoleChange(name, role, "look-ahead") for name, role in best.items() if role is not now[name]]
    # New decode workers first: the last one could not leave before.
    return sorted(changes, key=lambda change: change.role is not Role.DECODE)


def _has_memory(situation: PoolsSituation, roles: Roles) -> bool:
    """Whether the sessions would have room to grow. A replay of minutes does not show that memory will be short."""
    from planner.look_ahead.memory import sessions_share

    owners = [view for view in situation.workers if view.role.owns_sessions]
    after = [view for view in situation.workers if roles[view.worker_id].owns_sessions]
    return len(after) >= len(owners) or _RULE.leaves_room(sessions_share(owners, after))


_RULE = PredictivePools.model_validate({})
_RECENT_S = 30.0
"""Rounds that ended within this time count for `CONTENT`."""
_LEAST_ROUNDS = 20
"""With fewer rounds nothing is known. Long sessions at a low rate need minutes to have this many."""
_LATEST_S = 15.0
"""The latest rounds are those of this time. A shortage of a few percent shows in the queues only after it."""
_LEAST_ROUNDS_PER_WORKER = 10
"""At least this many rounds per worker are the latest rounds."""
_MOST_ROUNDS = 5000
_MORE = 4
"""How many times as many rounds decide where chance hides a gain. That costs about as much as the first comparison."""
_LEAST_MORE = 1.5
"""A record that is not this much longer decides nothing new."""
