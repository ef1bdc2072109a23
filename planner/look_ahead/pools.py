"""Our pools with a look ahead: other roles are simulated with the recent load before they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ampd.policies.base import Considered, PoolsSituation, RoleChange, TriedRoles
from ampd.policies.pools.predictive import KV_SHORT, PredictivePools, kv_share
from ampd.policies.registry import Policy, register
from ampd.recent_load import latest_rounds, met_and_missed, rounds_since
from ampd.types import Role, WorkerView

if TYPE_CHECKING:
    from planner.look_ahead.candidates import Roles
    from planner.look_ahead.replay import Replay


@register("pools", "look-ahead")
class LookAheadPools(Policy):
    """Serve the recent load again in the simulator, under other roles, and take the roles that serve it best. Where KV
    memory is short, which a replay of minutes does not show, change what `predictive` changes.

    Reads: the rounds of the last five minutes (arrival, prompt, history, output, whether they met their targets); the
    workers' parallelism, memory, queues and sessions; the performance model; the targets; the graph's other policies.

    Rule:

    1. No other roles are tried while more than `content` of the rounds of the last 30 s met their targets, and none
       within `cooldown_s` of a change. If fewer than 20 rounds ended in 30 s, those of the last five minutes count.
    2. The latest rounds, `rounds_per_worker` for each worker and at least those of the last 15 s (at most 5000), are
       served again by the simulator, with arrivals and pauses `stress` times as short: under the present roles, with
       one worker and with a quarter of the workers moved either way, and with all workers decoding, which is
       co-located serving. If the present roles attain so much that none could gain, no others are tried. Roles with
       fewer owners of sessions are not tried where the sessions' KV would take more than 40 % of the memory of those
       that remain, because sessions grow.
    3. The best roles are taken if they attain `gain` more than the present ones, and if the difference is not chance
       (two standard deviations of the rounds that only one of the two met). The attainment is the mean of that of the
       rounds and that of the sessions.
    4. If no roles are taken, or none were tried, a prefill worker becomes a decode worker where `predictive` would
       change it for want of memory (`kv-short`), also while all targets are met. It stays if the present roles are the
       better ones by the measure of 3.

    Limits: it knows only the load that came. A live graph records only rounds that ended by themselves, so rounds that
    clients give up are not seen. A change helps the sessions to come, because sessions stay where they are bound unless
    they may move (`--moves`). A look takes a second or more of one core; a live graph gives it to a process of its own.

    Example: `--pools look-ahead`
    """

    interval_s: ClassVar[float] = 10.0
    load_s: ClassVar[float] = 300.0
    is_slow: ClassVar[bool] = True

    content: float = Field(0.97, gt=0, le=1, description="Share of met rounds above which no other roles are tried.")
    gain: float = Field(0.02, ge=0, description="Least gain of attainment for which roles change.")
    cooldown_s: float = Field(15.0, ge=0, description="Least time between two changes, in seconds.")
    rounds_per_worker: int = Field(100, ge=1, description="Rounds that are served again, per worker.")
    stress: float = Field(1.15, gt=0, description="How many times as short arrivals and pauses are made.")

    def change(self, situation: PoolsSituation) -> Sequence[RoleChange]:
        for_memory = [change for change in _RULE.change(situation) if change.reason == KV_SHORT]
        is_due = self._is_due(situation)
        return self._look(situation, for_memory, is_due) if for_memory or is_due else ()

    def _is_due(self, situation: PoolsSituation) -> bool:
        """Whether too many rounds miss their targets, and roles have not just changed."""
        if situation.now_s - situation.changed_s < self.cooldown_s:
            return False
        for last_s in (_RECENT_S, self.load_s):
            met, missed = met_and_missed(situation.load, situation.now_s, last_s, situation.slo.ttft_s)
            if met + missed >= _LEAST_ROUNDS:
                return met <= self.content * (met + missed)
        return False

    def _look(self, situation: PoolsSituation, for_memory: Sequence[RoleChange], is_due: bool) -> Sequence[RoleChange]:
        # Every process of a graph imports all policies. Only the one that looks needs the simulator.
        from planner.look_ahead.candidates import candidate_roles, in_words
        from planner.look_ahead.recorded import recorded_load
        from planner.look_ahead.replay import replay

        recorded = recorded_load(latest_rounds(situation.load, self._most_rounds(situation)), self.stress)
        if not recorded.rounds:
            return for_memory
        now, *others = candidate_roles(situation.workers, situation.model)
        present = replay(recorded, now, situation)
        if not is_due or present.share > 1 - self.gain:
            others = []
        others = [roles for roles in others if _has_memory(situation.workers, roles)]
        replays = [(roles, replay(recorded, roles, situation)) for roles in others]
        tried = [TriedRoles(in_words(now), present.share, is_now=True)]
        tried += [TriedRoles(in_words(roles), each.share) for roles, each in replays]
        changes = self._changes(now, present, replays)
        if for_memory and not changes:
            roles = dict(now) | {change.worker_id: change.role for change in for_memory}
            with_more = replay(recorded, roles, situation)
            tried.append(TriedRoles(in_words(roles), with_more.share))
            changes = () if present.is_better_than(with_more, self.gain) else for_memory
        is_chance = not changes and any(each.gains(present, self.gain) for _, each in replays)
        return Considered(changes, tried, recorded.rounds, is_chance=is_chance)

    def _most_rounds(self, situation: PoolsSituation) -> int:
        """How many rounds are served again. A few seconds of a high load would not show that it is too much."""
        recent = rounds_since(situation.load, situation.now_s - _LEAST_SPAN_S)
        least = sum(len(rounds) for rounds in recent.values())
        return min(max(self.rounds_per_worker * len(situation.workers), least), _MOST_ROUNDS)

    def _changes(self, now: Roles, present: Replay, replays: Sequence[tuple[Roles, Replay]]) -> Sequence[RoleChange]:
        better = [(roles, each) for roles, each in replays if each.is_better_than(present, self.gain)]
        if not better:
            return ()
        best, _ = max(better, key=lambda item: item[1].share)
        changes = [RoleChange(name, role, "look-ahead") for name, role in best.items() if role is not now[name]]
        # New decode workers first: the last one could not leave before.
        return sorted(changes, key=lambda change: change.role is not Role.DECODE)


def _has_memory(workers: Sequence[WorkerView], roles: Roles) -> bool:
    """Whether the sessions would have room to grow. A replay of minutes does not show that memory will be short."""
    owners = [view for view in workers if view.role.owns_sessions]
    after = [view for view in workers if roles[view.worker_id].owns_sessions]
    return len(after) >= len(owners) or kv_share(owners, after) <= 0.5 * _RULE.full


_RULE = PredictivePools.model_validate({})
_RECENT_S = 30.0
"""Rounds that ended within this time count for `content`."""
_LEAST_ROUNDS = 20
"""With fewer rounds nothing is known. Long sessions at a low rate need minutes to have this many."""
_LEAST_SPAN_S = 15.0
"""A shortage of a few percent shows in the queues only after this time."""
_MOST_ROUNDS = 5000
