"""What a worker is for at the moment: the role that it was started with, until the leading coordinator assigns another.

Nothing else changes with it: every worker serves every endpoint, rounds in progress go on, bound sessions stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from ampd.state.store import RoleAssigned, StateStore, StateUnavailableError
from ampd.types import Role, pool_name

log = logging.getLogger(__name__)
_RETRY_S = 1.0


class WorkerRole:
    """Role and lane of this worker, as its next view says them; `changes` counts the new roles that it took."""

    def __init__(self, role: Role) -> None:
        self.changes: Counter[Role] = Counter()
        self.role = role
        self.lane = ""

    def adopt(self, assigned: RoleAssigned) -> bool:
        """Take an assigned role; whether it is another one."""
        if (assigned.role, assigned.lane) == (self.role, self.lane):
            return False
        log.info(
            "role: %s -> %s (%s)",
            pool_name(self.role, self.lane),
            pool_name(assigned.role, assigned.lane),
            assigned.reason,
        )
        self.changes[assigned.role] += assigned.role is not self.role
        self.role, self.lane = assigned.role, assigned.lane
        return True


async def hear_roles(store: StateStore, worker_id: str, rouse: Callable[[], None], retry_s: float = _RETRY_S) -> None:
    """Call `rouse` for ever, whenever this worker may have been assigned a role: then its next publication says which.

    Only a hint, so that it need not wait for a heartbeat: publications come one after the other, and so their answers
    never bring an older role after a newer one.
    """
    while True:
        watcher = store.watch_roles()
        try:
            await watcher.start()
            async for event in watcher:
                if isinstance(event, RoleAssigned) and event.worker_id == worker_id:
                    rouse()
        except StateUnavailableError as error:
            log.debug("not hearing of roles at once: %s", error)
        finally:
            await watcher.aclose()
        await asyncio.sleep(retry_s)
