"""Highest response ratio next."""

from __future__ import annotations

from math import inf

from ampd.policies.base import OrderingSituation, Pick
from ampd.policies.ordering.jct import first_of_least
from ampd.policies.registry import Policy, register


@register("ordering", "hrrn")
class HrrnOrdering(Policy):
    """Run the task with the highest response ratio: the time it has waited, in units of its own prefill time.

    Reads: history, increment and arrival of every task in the queue; the performance model's prefill times, one call
    for each task.

    Rule: the task with the highest (waited + prefill time) / prefill time runs; of equal ones the first to arrive. The
    ratio of a short task grows fast. That of a long task grows slowly but without end, so no task starves.

    Limits: it does not read targets. In a short queue it is close to shortest first. A long queue of old tasks moves it
    towards order of arrival.

    Example: `--ordering hrrn`
    """

    def pick(self, situation: OrderingSituation) -> Pick:
        model, parallelism, now_s = situation.model, situation.parallelism, situation.now_s
        ranks = []
        for task in situation.queue:
            prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
            # Without the constant 1. A task that takes no time has waited infinitely many of its own times.
            ranks.append(-(now_s - task.arrival_s) / prefill_s if prefill_s > 0.0 else -inf)
        return first_of_least(ranks)
