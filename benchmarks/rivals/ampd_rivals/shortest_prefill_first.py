"""Shortest job first, by predicted prefill time."""

from __future__ import annotations

from ampd.policies.base import OrderingSituation, Pick
from ampd.policies.ordering.jct import first_of_least
from ampd.policies.registry import Policy, register


@register("ordering", "shortest-prefill-first")
class ShortestPrefillFirst(Policy):
    """Run the task with the least predicted prefill time.

    Reads: history and increment of every task in the queue; the performance model's prefill times, one call for each
    task.

    Rule: the task with the least prefill time runs; of equal ones the first to arrive. History counts: an increment
    behind a long context takes longer than the same increment behind a short context.

    Limits: it gives the least mean waiting time, but a long task waits for as long as shorter ones keep coming. It does
    not read targets.

    Example: `--ordering shortest-prefill-first`
    """

    def pick(self, situation: OrderingSituation) -> Pick:
        model, parallelism = situation.model, situation.parallelism
        return first_of_least(
            [model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism) for task in situation.queue]
        )
