"""Roles that change in a simulation: the pools policy is asked at intervals, and its changes take effect at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from ampd.policies.base import OtherPolicies
from ampd.serving.roles import DueChange, RoleReview, due_changes, next_question_s
from planner.simulator.views import Views
from planner.simulator.worker import SimulatedWorker
from planner.simulator.world import World


class RoleKeeper:
    """Changes the roles and lanes of the workers.

    Args:
        is_over: whether all sessions have ended. The policy is not asked any more then.

    Attributes:
        role_flips: changes of a role, or from one lane to another, so far. A worker's first lane is not counted.
    """

    def __init__(
        self, world: World, workers: Sequence[SimulatedWorker], views: Views, is_over: Callable[[], bool]
    ) -> None:
        self.role_flips = 0
        self._loop = world.loop
        self._interval_s = world.options.pools_interval_s
        policies, options = world.policies, world.options
        self._is_idle = policies.pools.is_idle
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
        situation = self._review.situation(self._views.workers(0), now_s, self._changed_s, load)
        for due in due_changes(situation.workers, self._review.policy.change(situation)).changes:
            self._apply(due)
        self._loop.at(max(now_s + self._interval_s, next_question_s(self._review.policy, now_s)), self._ask)

    def _apply(self, due: DueChange) -> None:
        change, before = due.change, due.before
        self._changed_s = self._loop.now_s
        self.role_flips += before.role is not change.role or bool(before.lane)
        worker = self._workers[change.worker_id]
        worker.turn(change.role, change.lane)
        self._views.roles_changed()
