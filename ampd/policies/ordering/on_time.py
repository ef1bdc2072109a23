"""Our ordering: the earliest due prefill that can still be on time. The hopeless ones run when no other waits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

from pydantic import Field

from ampd.perf.model import joined_tokens
from ampd.policies.base import OrderingSituation, Pick, Run
from ampd.policies.estimates import ORDERED_PREFILLS, as_job, left_s, shortest_pass_s
from ampd.policies.moore_hodgson import Job, keep
from ampd.policies.registry import Policy, register


@register("ordering", "on-time")
class OnTimeOrdering(Policy):
    """Find the largest set of prefills that can all meet their targets, and run the one of it that is due first. The
    other prefills wait until the queue is quiet.

    Reads: arrival and TTFT target of the waiting prefills; history, increment and `session_missed` of the first 128
    that can be on time; prefill times of the performance model, one call for each prefill whose target is not over.

    Rule:

    1. A prefill that would be late even if it ran alone and at once is hopeless. The others are sorted by deadline.
       Whenever a prefill would be late, the prefill that frees the most time for the least weight is given up for
       now (Moore-Hodgson, exact for equal weights). Of the prefills that are kept, the one that is due first runs.
    2. A prefill of a session that has missed a target before weighs half, because a session counts only
       if all of its rounds are on time.
    3. The prefills that are due next go along in the same pass, as long as it takes no longer than three shortest
       passes and makes no prefill late.
    4. A hopeless prefill is due again after 5 TTFT targets, and takes part in 1 to 3 with a quarter of the weight.
       So long prompts of sessions that can still end in time do not starve.
    5. Prefills that are late for that too run when no other prefill waits, the shortest first. A share of
       `late_share` of all picks takes the oldest of them, so that they end under a steady load too.

    Limits: in a lasting overload hopeless rounds wait long. Times are as good as the model. The share of a decode
    worker's time that the decode batch takes does not count.

    Example: `--ordering on-time`
    """

    late_share: float = Field(0.05, ge=0, le=1, description="Share of the picks that go to hopeless prefills.")

    AGAIN_TARGETS: ClassVar[float] = 5.0
    """TTFT targets after which a late prefill is due again."""
    AGAIN_WEIGHT: ClassVar[float] = 0.25
    """Weight of one that is due again."""
    TOGETHER_PASSES: ClassVar[float] = 3.0
    """Longest pass of several prefills, in shortest passes."""
    WINDOW: ClassVar[int] = ORDERED_PREFILLS
    """How many of the prefills that can be on time are considered."""

    def pick(self, situation: OrderingSituation) -> Pick:
        if len(situation.queue) == 1:
            return Run(0)
        jobs, hopeless = self._jobs(situation)
        if not jobs:
            index = self._shortest(situation, hopeless)
        elif hopeless and self.late_share and situation.rng.random() < self.late_share:
            index = hopeless[0]
        else:
            kept, _ = keep(jobs)
            kept.sort(key=_by_due)
            return self._pass(situation, kept)
        return Run(index, tuple(range(index)))

    def _pass(self, situation: OrderingSituation, kept: Sequence[Job]) -> Run:
        """The prefill that is due first, and the next ones that a short pass can take along."""
        queue, model, parallelism = situation.queue, situation.model, situation.parallelism
        earliest = kept[0]
        first = queue[earliest.position]
        # The first of the pass is due first, and its token comes with the pass.
        limit_s = min(self.TOGETHER_PASSES * shortest_pass_s(model, first.hist_tokens, parallelism), earliest.due_s)
        parts = [(first.hist_tokens, first.incr_tokens)]
        together: list[int] = []
        for job in kept[1:] if earliest.time_s < limit_s else ():
            task = queue[job.position]
            parts.append((task.hist_tokens, task.incr_tokens))
            if model.prefill_s(*joined_tokens(parts), parallelism) > limit_s:
                break
            together.append(job.position)
        postponed = tuple(position for position in range(earliest.position) if position not in together)
        return Run(earliest.position, postponed, tuple(together))

    def _jobs(self, situation: OrderingSituation) -> tuple[list[Job], list[int]]:
        """(those that can be on time, or when they are due again, positions of the others), in order of the queue."""
        model, parallelism, now_s = situation.model, situation.parallelism, situation.now_s
        window, again_targets, again_weight = self.WINDOW, self.AGAIN_TARGETS - 1.0, self.AGAIN_WEIGHT
        jobs: list[Job] = []
        hopeless: list[int] = []
        for position, task in enumerate(situation.queue):
            again_s = left_s(task, now_s) + again_targets * task.slo.ttft_s
            if again_s <= 0.0:
                hopeless.append(position)
                continue
            time_s = model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
            job = as_job(task, position, time_s, now_s)
            if time_s > job.due_s:
                if time_s > again_s:
                    hopeless.append(position)
                    continue
                job = Job(again_s, time_s, again_weight, position)
            jobs.append(job)
            if len(jobs) == window:
                break
        return jobs, hopeless

    def _shortest(self, situation: OrderingSituation, hopeless: Sequence[int]) -> int:
        """Position of the hopeless prefill that takes the least time; the first of equal ones."""
        model, queue, parallelism = situation.model, situation.queue, situation.parallelism
        # Without a list and `min`, because this runs at each pick of an overloaded queue.
        shortest, least_s = hopeless[0], inf
        for place in hopeless[: self.WINDOW]:
            task = queue[place]
            time_s = model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
            if time_s < least_s:
                shortest, least_s = place, time_s
        return shortest


def _by_due(job: Job) -> tuple[float, int]:
    return job.due_s, job.position
