"""Shared state: what coordinators and workers know of each other, in Redis or in this process."""

from ampd.state.connect import open_store

__all__ = ["open_store"]
