"""Ordering by session: those that already run go first (the co-located rival of arXiv 2602.14516, after Continuum)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask


@register("ordering", "continuum")
class ContinuumOrdering(Policy):
    """Run prefills of sessions that already have KV before those of new sessions; in order of arrival within both.

    Reads: history of every task in the queue.

    Rule: the first task with history runs; without one the head of the queue. Everything before it counts as
    postponed.

    Limits: new sessions wait as long as running ones keep coming; it knows neither targets nor lengths. A session whose
    KV was evicted counts as new.

    Example: `--ordering continuum`
    """

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,  # noqa: ARG002
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The first task of a running session, else the head."""
        index = next((position for position, task in enumerate(queue) if task.hist_tokens), 0)
        return Pick(index, tuple(range(index)))
