"""Every key, channel and TTL of the shared state in Redis. docs/state.md explains them.

The hash tag `{namespace}` keeps a namespace's keys in one slot, so that one script may use several of them.
"""

from __future__ import annotations

from ampd.state.known_worker import QUEUE_GRACE_S

QUEUE_TTL_S = 60.0
"""Seconds from the last change to a worker's queue until the stored changes expire; a live worker's go much sooner."""

INDEX_TTL_S = 60.0
"""Seconds for which a worker or a coordinator stays in its index after its lease. The next heartbeat of any worker
announces the end of a worker."""

ASSIGNED_TTL_S = 3600.0
"""Seconds for which the time of the last assigned role is kept: a pools policy counts from it."""

ENDING_TTL_S = 5.0
"""Seconds for which a binding outlives the last write of a round that ends its session. Another coordinator that goes
on with the round finds the owner. The end of the round deletes the binding before, unless its coordinator is gone."""

ENDED_S = 600.0
"""Seconds for which the end of a session is known. A worker that was away reads it when it comes back."""

DEATHS_TTL_S = 1200.0
"""Seconds for which the deaths under a prompt are counted after the last. It is refused for half as long at most."""

REFUSED_S = 10.0
"""Seconds for which a prompt is refused after the second death under it. Each further death quadruples them.

Short at first, because rounds that ran beside a deadly one are refused too."""

FATAL_DEATHS = 2
REQUEST_TTL_S = 60.0
"""Deaths under a prompt after which it is refused. One may be a coincidence, and the prompt is tried once more."""

QUEUE_GRACE_MS = int(QUEUE_GRACE_S * 1000)


class Schema:
    """Key names of one namespace. docs/state.md says what each key holds."""

    def __init__(self, namespace: str) -> None:
        self.prefix = f"ampd:{{{namespace}}}:"
        self.workers = self.prefix + "workers"
        self.coordinators = self.prefix + "coordinators"
        self.leader = self.prefix + "leader"
        self.assigned = self.prefix + "assigned"
        self.live = self.prefix + "live"
        self.ended = self.prefix + "ended"
        self.events = self.prefix + "events"
        self.roles = self.prefix + "roles"

    def worker(self, worker_id: str) -> str:
        return self.prefix + "worker:" + worker_id

    def queue(self, worker_id: str) -> str:
        """Prefills that were entered in a worker's queue or finished since its view."""
        return self.prefix + "queue:" + worker_id

    def session(self, session_id: str) -> str:
        return self.prefix + "session:" + session_id

    def live_of(self, tenant_key: str) -> str:
        """The live sessions of a tenant."""
        return self.prefix + "live:" + tenant_key

    def tenant_of(self, session_id: str) -> str:
        """The tenant of a session, because a coordinator that ends the session may not know it."""
        return self.prefix + "tenant:" + session_id

    def deaths(self, prompt_digest: str) -> str:
        """The workers that died while they ran a prompt."""
        return self.prefix + "deaths:" + prompt_digest

    def refused(self, prompt_digest: str) -> str:
        """How many workers died while they ran a prompt that is not tried for now."""
        return self.prefix + "refused:" + prompt_digest

    def request(self, request_id: str) -> str:
        """The coordinator that placed a client's request last."""
        return self.prefix + "request:" + request_id

    def role(self, worker_id: str) -> str:
        return self.prefix + "role:" + worker_id

    def coordinator(self, coordinator_id: str) -> str:
        return self.prefix + "coordinator:" + coordinator_id


def ms(seconds: float) -> int:
    """A TTL for Redis in whole milliseconds, at least one."""
    return max(1, round(seconds * 1000))
