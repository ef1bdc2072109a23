"""Orderings that give each task one number and run the task with the least."""

from __future__ import annotations

from collections.abc import Sequence

from ampd.policies.base import Run


def first_of_least(ranks: Sequence[float]) -> Run:
    """The task of the least rank, the first to arrive of equal ones. All tasks before it count as postponed."""
    index = ranks.index(min(ranks))
    return Run(index, tuple(range(index)))
