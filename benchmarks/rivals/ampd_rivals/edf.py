"""Earliest deadline first."""

from __future__ import annotations

from ampd.policies.base import OrderingSituation, Pick
from ampd.policies.ordering.jct import first_of_least
from ampd.policies.registry import Policy, register


@register("ordering", "edf")
class EdfOrdering(Policy):
    """Run the task whose first token is due first.

    Reads: arrival and TTFT target of every task in the queue.

    Rule: the task with the least arrival + TTFT target runs; of equal ones the first to arrive. With one target for
    all tasks this is order of arrival.

    Limits: in overload it spends the worker on tasks that are too late already, and so makes the next ones late too.
    It does not read lengths.

    Example: `--ordering edf`
    """

    def pick(self, situation: OrderingSituation) -> Pick:
        return first_of_least([task.arrival_s + task.slo.ttft_s for task in situation.queue])
