"""Decisions of the serving path, without clock and I/O: called by router, workers and simulator alike."""
