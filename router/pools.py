"""Roles that change: one of the coordinators leads, asks the pools policy and assigns roles through the shared state.

A role is what new work a worker is for. A worker whose role changes goes on with what it has: its running rounds, and
its sessions, until they leave it between two rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ampd.background_tasks import SupervisedTask
from ampd.errors import UserError
from ampd.policies.base import RoleChange
from ampd.serving.roles import DueChange, RoleReview, due_changes
from ampd.state.redis_store import StateStore
from ampd.state.store import Leadership, RoleAssigned, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import Role, WorkerView

log = logging.getLogger(__name__)

_ROLE_LEASES = 3.0
"""Leases for which an assigned role is remembered; a live worker learns it within a third of a lease."""


@dataclass(frozen=True, slots=True)
class _Assigned:
    """A role that its worker has not published yet."""

    role: Role
    label: str
    until_s: float


class PoolsKeeper:
    """Keeps the workers' roles as a pools policy wants them, while this coordinator leads.

    Without the shared state no coordinator leads and no role changes.

    Args:
        review: the policy, with the default targets of a round.
        interval_s: seconds between two questions to the policy.
        lease_s: another coordinator leads after this time without a sign of the leader; longer than the interval.

    Attributes:
        assignments: how often a role was assigned, by role and reason.
    """

    def __init__(
        self,
        view: ClusterView,
        store: StateStore,
        review: RoleReview,
        interval_s: float,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._store = store
        self._review = review
        self._interval_s = interval_s
        self._lease_s = max(lease_s, 3 * interval_s)
        self._clock = clock
        self.assignments: Counter[tuple[Role, str]] = Counter()
        self._holder = uuid.uuid4().hex
        self._assigned: dict[str, _Assigned] = {}
        self._is_leading = False
        # Before that, workers are starting, and those that own sessions may be the last to be there.
        self._has_seen_owner = False
        self._warned: set[str] = set()
        self._task = SupervisedTask("pools", self._run)

    @property
    def is_leading(self) -> bool:
        """Whether this coordinator led when it last asked."""
        return self._is_leading

    def start(self) -> None:
        """Begin asking."""
        self._task.start()

    async def stop(self) -> None:
        """Stop asking, and let another coordinator lead at once."""
        if not self._task.is_running:
            return
        await self._task.stop()
        with contextlib.suppress(StateUnavailableError):
            await self._store.resign(self._holder)

    async def _run(self) -> None:
        while True:
            try:
                await self.step()
            except (StateUnavailableError, UserError) as error:
                self._follow()
                self._warn_once(str(error))
            await asyncio.sleep(self._interval_s)

    async def step(self) -> None:
        """Renew the lead or try for it. The leader asks the policy once and assigns its changes.

        Raises:
            StateUnavailableError: the shared state is lost; no role changes.
            UserError: the policy needs what the performance model lacks.
        """
        if not self._view.connected:
            # The view may be old, and an assignment would not be seen in it.
            self._follow()
            return
        lead = await self._store.lead(self._holder, self._lease_s)
        if not lead.leads:
            self._follow()
            return
        if not self._is_leading:
            self._is_leading = True
            self._warned.clear()
            log.info("this coordinator leads: it assigns the workers' roles")
        await self._ask(lead)

    async def _ask(self, lead: Leadership) -> None:
        now_s = self._clock()
        changed_s = float("-inf") if lead.assigned_ago_s is None else now_s - lead.assigned_ago_s
        workers = self._as_assigned(now_s)
        due = due_changes(workers, self._wanted(workers, now_s, changed_s))
        for kept in due.kept:
            change = kept.change
            self._warn_once(f"worker {change.worker_id} stays {kept.before.role} ({change.reason}): it is the last one")
        for due_change in due.changes:
            if not await self._assign(due_change):
                return

    def _wanted(self, workers: Sequence[WorkerView], now_s: float, changed_s: float) -> Sequence[RoleChange]:
        """The policy's answer. It is not asked while the last worker that owned sessions is lost."""
        if any(view.role.owns_sessions for view in workers):
            self._has_seen_owner = True
        elif self._has_seen_owner and (needed := self._review.first_owner(workers)):
            return needed
        return self._review.wanted(workers, now_s, changed_s)

    async def _assign(self, due: DueChange) -> bool:
        change, before = due.change, due.before
        role = RoleAssigned(change.worker_id, change.role, change.label, change.reason)
        ttl_s = _ROLE_LEASES * self._lease_s
        if not await self._store.assign_role(self._holder, role, ttl_s):
            # The lease ran out meanwhile, and another may lead by now.
            self._follow()
            return False
        self.assignments[change.role, change.reason] += 1
        self._assigned[change.worker_id] = _Assigned(change.role, change.label, self._clock() + ttl_s)
        log.info("worker %s: %s -> %s (%s)", change.worker_id, before.role, change.role, change.reason)
        return True

    def _as_assigned(self, now_s: float) -> tuple[WorkerView, ...]:
        """The workers, with the roles that they were given a moment ago and have not published yet."""
        views = {view.worker_id: view for view in self._view.workers()}
        for worker_id, assigned in list(self._assigned.items()):
            view = views.get(worker_id)
            if view is None or now_s >= assigned.until_s or (view.role, view.label) == (assigned.role, assigned.label):
                del self._assigned[worker_id]
            else:
                views[worker_id] = replace(view, role=assigned.role, label=assigned.label)
        return tuple(views.values())

    def _follow(self) -> None:
        if self._is_leading:
            log.info("this coordinator no longer leads")
        self._is_leading = False
        self._assigned.clear()

    def _warn_once(self, line: str) -> None:
        """Log each message once per leadership term, because the policy runs twice a second."""
        if line not in self._warned:
            self._warned.add(line)
            log.warning("pools: %s", line)
