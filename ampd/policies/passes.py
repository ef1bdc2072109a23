"""Several prefills in one pass of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ampd.types import PrefillTask


def as_one(tasks: Sequence[PrefillTask]) -> PrefillTask:
    """The first task, as long as all of them together: their increments behind the mean history of a new token."""
    incr_tokens = sum(task.incr_tokens for task in tasks)
    hist_tokens = sum(task.hist_tokens * task.incr_tokens for task in tasks) // max(incr_tokens, 1)
    return replace(tasks[0], hist_tokens=hist_tokens, incr_tokens=incr_tokens)
