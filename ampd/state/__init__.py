"""Shared state: what coordinators and workers know of each other, in Redis."""

from ampd.state.redis_store import open_store

__all__ = ["open_store"]
