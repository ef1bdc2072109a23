"""Continuum: prefills of sessions that already run go first (the co-located rival of arXiv 2602.14516)."""

from __future__ import annotations

from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.registry import Policy, register


@register("ordering", "continuum")
class ContinuumOrdering(Policy):
    """Run prefills of sessions that already have KV before those of new sessions; in order of arrival within both.

    Reads: history of every task in the queue.

    Rule: the first task with history runs; without one the head of the queue. Everything before it counts as
    postponed.

    Limits: new sessions wait as long as running ones keep coming. It reads neither targets nor lengths. A session whose
    KV was evicted counts as new.

    Example: `--ordering continuum`
    """

    def pick(self, situation: OrderingSituation) -> Pick:
        index = next((position for position, task in enumerate(situation.queue) if task.hist_tokens), 0)
        return Run(index, tuple(range(index)))
