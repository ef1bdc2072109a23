"""Every key, channel and TTL of shared state in Redis, and nothing else. docs/state.md explains them.

The hash tag `{namespace}` keeps a namespace's keys in one slot, so that one script may touch several of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampd.serving.overlay import QUEUE_GRACE_S
from ampd.state.codec import to_bytes

QUEUE_TTL_S = 60.0
"""Life of what was written about a worker's queue since the last write to it; a live worker's is pruned long before."""

INDEX_TTL_S = 60.0
"""How long a worker or a coordinator stays in its index after its lease; the next heartbeat of any worker announces a
worker's end."""

ASSIGNED_TTL_S = 3600.0
"""How long it is remembered when a role was last assigned: a pools policy counts from it."""

QUEUE_GRACE_MS = int(QUEUE_GRACE_S * 1000)


@dataclass(frozen=True, slots=True)
class Schema:
    """Key names of one namespace, as bytes, because ids may be any string. docs/state.md says what each key holds."""

    namespace: str

    @property
    def prefix(self) -> bytes:
        """What every key begins with."""
        return to_bytes(f"ampd:{{{self.namespace}}}:")

    @property
    def workers(self) -> bytes:
        """The index of workers."""
        return self.prefix + b"workers"

    def worker(self, worker_id: str) -> bytes:
        """A worker's own word."""
        return self.prefix + b"worker:" + to_bytes(worker_id)

    def queue(self, worker_id: str) -> bytes:
        """Prefills entered in or struck out of a worker's queue since it spoke."""
        return self.prefix + b"queue:" + to_bytes(worker_id)

    def session(self, session_id: str) -> bytes:
        """A session's binding."""
        return self.prefix + b"session:" + to_bytes(session_id)

    def role(self, worker_id: str) -> bytes:
        """The role that was assigned to a worker."""
        return self.prefix + b"role:" + to_bytes(worker_id)

    @property
    def coordinators(self) -> bytes:
        """The index of coordinators."""
        return self.prefix + b"coordinators"

    def coordinator(self, coordinator_id: str) -> bytes:
        """A coordinator's own word."""
        return self.prefix + b"coordinator:" + to_bytes(coordinator_id)

    @property
    def leader(self) -> bytes:
        """The coordinator that assigns roles."""
        return self.prefix + b"leader"

    @property
    def assigned(self) -> bytes:
        """When a role was last assigned."""
        return self.prefix + b"assigned"

    @property
    def events(self) -> bytes:
        """The channel of events."""
        return self.prefix + b"events"

    @property
    def roles(self) -> bytes:
        """The channel of assigned roles, apart from the events: workers need not hear those."""
        return self.prefix + b"roles"


def ms(seconds: float) -> int:
    """A TTL for Redis: whole milliseconds, at least one."""
    return max(1, round(seconds * 1000))
