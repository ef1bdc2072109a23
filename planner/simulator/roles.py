"""Roles that change: the pools policy is asked again and again, and what it says is done at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.base import PoolsPolicy, RoleChange
from ampd.policies.pools.static import StaticPools
from ampd.types import Role, Slo
from planner.simulator.events import EventLoop
from planner.simulator.options import SimulationOptions
from planner.simulator.views import Views
from planner.simulator.worker import SimulatedWorker


class RoleKeeper:
    """Asks the pools policy every so often, as the coordinator that leads does live, and changes roles and lanes.

    Args:
        is_over: whether all sessions have ended; nothing is asked any more then.

    Attributes:
        role_flips: changes of a role, or from one lane to another, so far; the first lane of a worker is none.
    """

    def __init__(
        self,
        workers: Sequence[SimulatedWorker],
        views: Views,
        policy: PoolsPolicy,
        model: PerformanceModel,
        slo: Slo,
        loop: EventLoop,
        options: SimulationOptions,
        is_over: Callable[[], bool],
    ) -> None:
        self.role_flips = 0
        self._workers = {worker.worker_id: worker for worker in workers}
        self._views = views
        self._policy = policy
        self._model = model
        self._slo = slo
        self._loop = loop
        self._interval_s = options.pools_interval_s
        self._rng = random.Random(f"{options.seed}/pools")
        self._is_over = is_over
        self._changed_s = -math.inf

    def start(self) -> None:
        """Begin to ask, unless the roles are static: such a run has no event more than it needs."""
        if not isinstance(self._policy, StaticPools):
            self._loop.at(self._loop.now_s, self._ask)

    def _ask(self, _: object) -> None:
        if self._is_over():
            return
        now_s = self._loop.now_s
        changes = self._policy.change(self._views.workers(0), self._slo, self._model, now_s, self._changed_s, self._rng)
        for change in changes:
            self._apply(change)
        self._loop.at(now_s + self._interval_s, self._ask)

    def _apply(self, change: RoleChange) -> None:
        worker = self._workers[change.worker_id]
        if (worker.role, worker.lane) == (change.role, change.lane):
            return
        others = [one for one in self._workers.values() if one is not worker]
        if change.role is Role.PREFILL and not any(one.role is Role.DECODE for one in others):
            return  # as live: the last decode worker keeps its role, or no session could begin
        self._changed_s = self._loop.now_s
        self.role_flips += worker.role is not change.role or bool(worker.lane)
        worker.turn(change.role, change.lane)
        self._views.roles_changed()
