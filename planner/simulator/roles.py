"""Roles that change in a simulation: the pools policy is asked at intervals, and its changes take effect at once.

A slow policy may take a time to answer. Nothing else changes roles meanwhile, so that its answer always counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from ampd.policies.base import OtherPolicies, RoleChange
from ampd.serving.roles import DueChange, RoleReview, due_changes, rest_s
from ampd.types import WorkerView
from planner.simulator.views import Views
from planner.simulator.worker import SimulatedWorker
from planner.simulator.world import World


class RoleKeeper:
    """Changes the roles and labels of the workers.

    Args:
        is_over: whether all sessions have ended. The policy is not asked any more then.

    Attributes:
        role_flips: changes of a role, or from one label to another, so far. A worker's first label is not counted.
    """

    def __init__(
        self, world: World, workers: Sequence[SimulatedWorker], views: Views, is_over: Callable[[], bool]
    ) -> None:
        self.role_flips = 0
        self._loop = world.loop
        self._interval_s = world.options.pools_interval_s
        policies, options = world.policies, world.options
        self._is_idle = policies.pools.is_idle
        self._answer_s = options.pools_answer_s if policies.pools.is_slow else 0.0
        self._review = RoleReview(
            policies.pools,
            world.belief,
            world.slo,
            random.Random(f"{world.options.seed}/pools"),
            OtherPolicies(
                policies.binding,
                policies.routing,
                policies.ordering,
                policies.slicing,
                moves=options.moves,
                hand_over_pass=options.hand_over_pass,
            ),
        )
        self._load = world.load
        self._workers = {worker.worker_id: worker for worker in workers}
        self._views = views
        self._is_over = is_over
        self._changed_s = -math.inf

    def start(self) -> None:
        """Begin to ask. An idle policy is never asked, so that a run with static roles has no superfluous event."""
        if not self._is_idle:
            self._loop.at(self._loop.now_s, self._ask)

    def _ask(self, _: object) -> None:
        if self._is_over():
            return
        now_s = self._loop.now_s
        load = {} if self._load is None else self._load.until(now_s)
        situation = self._review.situation(self._views.workers(0), now_s, self._changed_s, load, self._answer_s)
        changes, answer_s = self._review.policy.change(situation), self._answer_s
        if answer_s and changes:
            self._loop.at(now_s + answer_s, self._answered, changes)
        else:
            self._make(situation.workers, changes)
        next_s = now_s + answer_s + rest_s(self._review.policy, answer_s)
        self._loop.at(max(now_s + self._interval_s, next_s), self._ask)

    def _answered(self, changes: Sequence[RoleChange]) -> None:
        if not self._is_over():
            self._make(self._views.workers(0), changes)

    def _make(self, workers: Sequence[WorkerView], changes: Sequence[RoleChange]) -> None:
        for due in due_changes(workers, changes).changes:
            self._apply(due)

    def _apply(self, due: DueChange) -> None:
        change, before = due.change, due.before
        self._changed_s = self._loop.now_s
        self.role_flips += before.role is not change.role or bool(before.label)
        worker = self._workers[change.worker_id]
        worker.turn(change.role, change.label)
        self._views.roles_changed()
