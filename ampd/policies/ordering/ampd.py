"""The ordering of the AMPD paper (Algorithm 2 of arXiv 2602.14516)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.moore_hodgson import first_of_best_ordering
from ampd.policies.registry import Policy, register

_HEAD = Run(0)


@register("ordering", "ampd")
class AmpdOrdering(Policy):
    """The paper's rule (its Algorithm 2), and not what AMPD does by default: look for the ordering of the next
    `window` tasks in which most of them meet their TTFT target, and run its first task.

    Reads: history, increment, arrival, TTFT target and postponements of the first `window` tasks; prefill times of
    the performance model, one call for each of those tasks.

    Rule: in an ordering of the window, the k-th task completes after the sum of the modelled prefill times up to
    it. It is on time if this sum plus the time that it has waited is at most its TTFT target. Of the orderings with
    the most tasks on time, the one closest to arrival order counts.

    A task is postponed when a later task of the queue runs before it. A task that has been postponed `window` times
    may not be overtaken any more: if one is in the window, the head of the queue runs.

    Limits: exact for any window (Moore-Hodgson), up to the rounding of floats. Tasks behind the window do not
    count.

    Example: `--ordering ampd`
    """

    help_note: ClassVar[str] = "the paper's Algorithm 2, not the default"

    window: int = Field(
        3, ge=1, le=1024, description="Tasks considered; also how often one task may be postponed (w in the paper)."
    )

    def pick(self, situation: OrderingSituation) -> Pick:
        limit = self.window
        tasks = situation.queue[:limit]
        if len(tasks) < 2:
            return _HEAD
        model, parallelism, now_s = situation.model, situation.parallelism, situation.now_s
        times_s: list[float] = []
        left_s: list[float] = []
        for task in tasks:
            if task.postponements >= limit:
                return _HEAD
            times_s.append(model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism))
            left_s.append(task.slo.ttft_s - (now_s - task.arrival_s))
        index = first_of_best_ordering(times_s, left_s)
        return Run(index, tuple(range(index))) if index else _HEAD
