"""Kairos (arXiv 2605.02329): prefills in order of urgency."""

from __future__ import annotations

from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.registry import Policy, register


@register("ordering", "kairos")
class KairosOrdering(Policy):
    """Run the prefill that would be late first, among those that can still be on time.

    After Kairos (arXiv 2605.02329), its prefill side.

    Reads: history, increment, arrival and TTFT target of every task in the queue; the performance model's prefill
    times, one call for each task.

    What the source says: it predicts when prefills complete, ranks requests by an urgency that compares this time with
    the TTFT target, and selects them so that as many as possible meet it.

    Rule: a task's slack is its deadline, less now, less its prefill time. Of the tasks whose slack is at least 0, the
    one with the least runs. Where there is none, the first to arrive runs.

    Our reading: the formula of the urgency was not available. The slack is the plain form of "predicted completion
    against the target". A task that cannot be on time any more yields to tasks that can.

    Limits: the decode side of the source is missing, which packs short requests into the batch as far as the ITL target
    allows. An engine admits every round here. Tasks that are late wait for as long as tasks keep coming that are not.

    Example: `--ordering kairos`
    """

    def pick(self, situation: OrderingSituation) -> Pick:
        model, parallelism, now_s = situation.model, situation.parallelism, situation.now_s
        best, least_s = 0, float("inf")
        for position, task in enumerate(situation.queue):
            prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
            slack_s = task.arrival_s + task.slo.ttft_s - now_s - prefill_s
            if 0.0 <= slack_s < least_s:
                best, least_s = position, slack_s
        return Run(best, tuple(range(best)))
