"""Ordering policies: which waiting prefill of a queue runs next (Algorithm 2 of arXiv 2602.14516, and FCFS)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.ordering.moore_hodgson import first_of_best_ordering
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask

_HEAD = Pick(0)


@register("ordering", "ampd")
class AmpdOrdering(Policy):
    """Run the first task of the ordering that lets the most of the next `window` tasks meet their TTFT target.

    Reads: history, increment, arrival, TTFT target and postponements of the first `window` tasks; prefill times of the
    performance model, one call for each of those tasks.

    Rule: over all orderings of the window, the k-th task completes after the sum of the modelled prefill times up to
    it, and is on time if that plus the time it has waited is at most its TTFT target. Of the orderings with the most
    tasks on time the one that stays closest to arrival order (the lexicographically first) counts, and its first task
    runs, so a queue without pressure stays in order of arrival.

    A task is postponed when a later task of the queue runs before it, and each pick counts once. A task that has been
    postponed `window` times may not be overtaken any more. Whoever is overtaken is overtaken together with everybody
    before it, so along a queue the counts never grow and the tasks at the limit are its first ones; where an input
    breaks that, everything before a task at the limit counts as at the limit too. Either way: as soon as one task of
    the window is at the limit, the head of the queue runs.

    Limits: exact for any window (Moore-Hodgson, not enumeration), up to the rounding of sums of floats; it does not
    know of tasks behind the window, nor of those that will still arrive; a task that can no longer be on time is held
    back by the limit alone.

    Example: `--ordering ampd`
    """

    window: int = Field(
        3, ge=1, le=1024, description="Tasks looked at; also how often one task may be postponed (w in the paper)."
    )

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,  # noqa: ARG002
    ) -> Pick:
        """The task to run and the positions that it overtakes."""
        limit = self.window
        tasks = queue[:limit]
        if len(tasks) < 2:
            return _HEAD
        prefill_s = model.prefill_s
        times_s: list[float] = []
        left_s: list[float] = []
        for task in tasks:
            if task.postponements >= limit:
                return _HEAD
            times_s.append(prefill_s(task.hist_tokens, task.incr_tokens, parallelism))
            left_s.append(task.slo.ttft_s - (now_s - task.arrival_s))
        index = first_of_best_ordering(times_s, left_s)
        return Pick(index, tuple(range(index))) if index else _HEAD
