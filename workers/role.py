"""A worker's present role: the role that it was started with, until the leading coordinator assigns another.

Nothing else changes with it: every worker serves every endpoint, rounds in progress go on, and sessions leave
between two rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from ampd.state.redis_store import StateStore
from ampd.state.store import RoleAssigned, StateUnavailableError
from ampd.types import Role

log = logging.getLogger(__name__)
_RETRY_S = 1.0


class WorkerRole:
    """Role and label of this worker, for its next view. `changes` counts the new roles that it took."""

    def __init__(self, role: Role) -> None:
        self.changes: Counter[Role] = Counter()
        self.role = role
        self.label = ""

    def adopt(self, assigned: RoleAssigned) -> bool:
        """Take an assigned role. Returns True if role or label changed."""
        if (assigned.role, assigned.label) == (self.role, self.label):
            return False
        log.info("role: %s -> %s (%s)", self.role, assigned.role, assigned.reason)
        self.changes[assigned.role] += assigned.role is not self.role
        self.role, self.label = assigned.role, assigned.label
        return True


async def follow_roles(
    store: StateStore, worker_id: str, notify: Callable[[], None], retry_s: float = _RETRY_S
) -> None:
    """Call `notify` whenever this worker may have been assigned a role; its next publication returns the role.

    The event is only a hint, which saves the wait for the next heartbeat. Publications come one after the other, so
    that an older role never arrives after a newer one. Runs until it is cancelled.
    """
    while True:
        watcher = store.watch_roles()
        try:
            await watcher.start()
            async for event in watcher:
                if isinstance(event, RoleAssigned) and event.worker_id == worker_id:
                    notify()
        except StateUnavailableError as error:
            log.debug("role changes arrive with the next heartbeat only: %s", error)
        finally:
            await watcher.aclose()
        await asyncio.sleep(retry_s)
