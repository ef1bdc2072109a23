"""Least job completion time, taken as proportional to the tokens to compute."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.registry import Policy, register


@register("ordering", "jct")
class JctOrdering(Policy):
    """Run the task with the fewest tokens to compute, where a task counts as smaller the longer it has waited.

    After the prefill-only optimisations of vLLM's disaggregated path.

    Reads: increment and arrival of every task in the queue.

    Rule: the task with the least increment - `ageing_tokens_per_s` * waited runs; of equal ones the first to
    arrive. With 0 it is shortest first, and tasks may starve.

    Limits: targets do not count, nor does the time that attention over the history and reading it take.

    Example: `--ordering jct`, `--ordering "jct(ageing_tokens_per_s=500)"`
    """

    ageing_tokens_per_s: float = Field(
        1000.0, ge=0, description="Tokens by which a waiting task becomes smaller per second."
    )

    def pick(self, situation: OrderingSituation) -> Pick:
        ageing, now_s = self.ageing_tokens_per_s, situation.now_s
        return first_of_least([task.incr_tokens - ageing * (now_s - task.arrival_s) for task in situation.queue])


def first_of_least(ranks: Sequence[float]) -> Run:
    """The task of the least rank, the first to arrive of equal ones. All tasks before it count as postponed."""
    index = ranks.index(min(ranks))
    return Run(index, tuple(range(index)))
