"""Shared state: what coordinators and workers know of each other, in Redis."""
