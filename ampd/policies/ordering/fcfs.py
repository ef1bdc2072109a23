"""First come, first served."""

from __future__ import annotations

from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.registry import Policy, register

_HEAD = Run(0)


@register("ordering", "fcfs")
class Fcfs(Policy):
    """Run prefills in order of arrival.

    Reads: nothing but the order of the queue.

    Limits: one long prefill makes everything behind it late.

    Example: `--ordering fcfs`
    """

    def pick(self, situation: OrderingSituation) -> Pick:  # noqa: ARG002
        return _HEAD
