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
from math import inf

from ampd.background_tasks import SupervisedTask
from ampd.errors import UserError
from ampd.policies.base import PoolsSituation, RoleChange
from ampd.policies.considered import Considered
from ampd.recent_load import RecentLoad
from ampd.serving.roles import NO_LOAD, DueChange, RoleReview, due_changes, rest_s
from ampd.state.redis_store import StateStore
from ampd.state.store import Leadership, RoleAssigned, StateUnavailableError
from ampd.state.view import ClusterView
from ampd.types import Role, WorkerView
from router.considered_roles import ConsideredRoles
from router.load_recorder import LoadRecorder
from router.policy_process import PolicyProcess, why_outdated

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
        considered: the sets of roles that the policy considered.
        recorder: observes this coordinator's rounds, for a policy that reads the recent load; None: it reads none.
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
        policy = review.policy
        self.recorder = LoadRecorder(store, policy.load_s, clock) if policy.load_s else None
        self._process = PolicyProcess(policy, clock) if policy.is_slow else None
        self._next_s = -inf
        self.considered = ConsideredRoles()
        self._task = SupervisedTask("pools", self._run)

    @property
    def is_leading(self) -> bool:
        """Whether this coordinator led when it last asked."""
        return self._is_leading

    @property
    def look_s(self) -> float:
        """Seconds that a slow policy has computed for this coordinator."""
        return 0.0 if self._process is None else self._process.spent_s

    def start(self) -> None:
        """Begin asking, and recording."""
        if self.recorder is not None:
            self.recorder.start()
        self._task.start()

    async def stop(self) -> None:
        """Stop asking, and let another coordinator lead at once."""
        if self._process is not None:
            self._process.stop()
        if not self._task.is_running:
            return
        await self._task.stop()
        if self.recorder is not None:
            await self.recorder.stop()
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
        wanted = await self._wanted(now_s, changed_s)
        if isinstance(wanted, Considered):
            self.considered.add(wanted)
        due = due_changes(self._as_assigned(now_s), wanted)
        for kept in due.kept:
            change = kept.change
            self._warn_once(f"worker {change.worker_id} stays {kept.before.role} ({change.reason}): it is the last one")
        for due_change in due.changes:
            if not await self._assign(due_change):
                return

    async def _wanted(self, now_s: float, changed_s: float) -> Sequence[RoleChange]:
        """The policy's answer. A slow policy answers later; until then nothing is wanted, and the lead is kept.

        The policy is not asked while the last worker that owned sessions is lost.
        """
        workers = self._as_assigned(now_s)
        if any(view.role.owns_sessions for view in workers):
            self._has_seen_owner = True
        elif self._has_seen_owner and (needed := self._review.first_owner(workers)):
            return needed
        process = self._process
        if process is not None:
            if process.is_due():
                process.ask(await self._situation(now_s, changed_s))
            return self._still_wanted(process, workers, now_s)
        if now_s < self._next_s:
            return ()
        self._next_s = now_s + rest_s(self._review.policy)
        return self._review.policy.change(await self._situation(now_s, changed_s))

    def _still_wanted(
        self, process: PolicyProcess, workers: Sequence[WorkerView], now_s: float
    ) -> Sequence[RoleChange]:
        """The answer of a slow policy, unless it is about other workers or another time."""
        changes, question = process.answer(), process.question
        if changes and question is not None and (why := why_outdated(question, workers, now_s)):
            self.considered.drop(why)
            return ()
        return changes

    async def _situation(self, now_s: float, changed_s: float) -> PoolsSituation:
        """The question, for a policy that reads it with the recent load of all coordinators.

        Of the rounds in progress only those of this coordinator are known.
        """
        load = NO_LOAD
        if load_s := self._review.policy.load_s:
            recent = RecentLoad(load_s)
            running = () if self.recorder is None else self.recorder.running()
            for session_id, item in sorted(
                [*await self._store.recent_load(), *running], key=lambda loaded: loaded[1].sent_s
            ):
                recent.add(session_id, item)
            load = recent.until(now_s)
        lasted_s = self._process.lasted_s if self._process is not None else 0.0
        return self._review.situation(self._as_assigned(now_s), now_s, changed_s, load, lasted_s)

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
            if self._process is not None:
                self._process.forget()
        self._is_leading = False
        self._assigned.clear()

    def _warn_once(self, line: str) -> None:
        """Log each message once per leadership term, because the policy runs twice a second."""
        if line not in self._warned:
            self._warned.add(line)
            log.warning("pools: %s", line)
