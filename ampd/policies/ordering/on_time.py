"""Our ordering: the earliest due of the prefills that can still be on time, the hopeless ones in what is left over."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.base import Pick
from ampd.policies.ordering.weighted_moore_hodgson import Job, job_of, keep
from ampd.policies.passes import shortest_pass_s
from ampd.policies.registry import Policy, register
from ampd.types import Parallelism, PrefillTask


@register("ordering", "on-time")
class OnTimeOrdering(Policy):
    """Run the earliest due of a largest set of prefills that can all be on time; what cannot waits for a quiet moment.

    Reads: arrival and TTFT target of the tasks; history, increment and `session_missed` of the first `window` that can
    be on time; prefill times of the performance model, one call for each task whose target is not over.

    Rule:

    1. A task that would be late even if it ran alone and at once is hopeless. The others are put in order of their
       deadlines; whenever one would be late, the task that frees the most time for the least weight is given up for
       now (Moore-Hodgson, exact for equal weights). Of what is kept, the earliest due runs. Looked at are the first
       `window` that are not hopeless: those pile up at the head of a queue, and must not hide the others.
    2. A task of a session that has missed a target before weighs `missed_weight`: a session counts only if all of its
       rounds are on time, so misses are better put where one has happened already.
    3. The tasks that are due next go along in the same pass as long as it takes no longer than `together_passes` of the
       shortest and makes nobody late: a short pass spends most of its time on reading the model's weights, which then
       happens once.
    4. Hopeless tasks run when nothing else is there, the shortest of the first `window` before the others. So that they
       end under a steady load too, one pick in `1 / late_share` takes the oldest of them.

    Together with a slicing policy a prefill is asked about again after each slice, so a long one is overtaken by what
    is urgent, and a hopeless one does not stand in anybody's way.

    Limits: in a lasting overload hopeless rounds wait long, `late_share` of the picks is all they get. Times are as
    good as the model; `headroom` keeps a part of the target for its error. It does not know how much of a decode
    worker's time the decode batch will take.

    Example: `--ordering on-time`
    """

    window: int = Field(128, ge=1, le=4096, description="Tasks looked at, of those that can be on time.")
    headroom: float = Field(0.95, gt=0, le=1, description="Share of the TTFT target that is planned with.")
    missed_weight: float = Field(
        0.5, gt=0, le=1, description="Weight of a round whose session has missed a target before."
    )
    together_passes: float = Field(
        3.0, ge=0, description="Longest pass of several prefills, in shortest passes; 0: never several."
    )
    late_share: float = Field(0.05, ge=0, le=1, description="Share of the picks that go to hopeless tasks.")

    def pick(
        self,
        queue: Sequence[PrefillTask],
        parallelism: Parallelism,
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,
    ) -> Pick:
        """The task to run and the positions that it overtakes."""
        if len(queue) == 1:
            return Pick(0)
        jobs, hopeless = self._jobs(queue, parallelism, model, now_s)
        if not jobs:
            index = self._shortest(queue, hopeless, parallelism, model)
        elif hopeless and self.late_share and rng.random() < self.late_share:
            index = hopeless[0]
        else:
            kept, _ = keep(jobs)
            kept.sort(key=lambda job: (job[0], job[3]))
            return self._pass(queue, kept, parallelism, model)
        return Pick(index, tuple(range(index)))

    def _pass(
        self, queue: Sequence[PrefillTask], kept: Sequence[Job], parallelism: Parallelism, model: PerformanceModel
    ) -> Pick:
        """The earliest due, and those after it that a short pass can take along."""
        index = kept[0][3]
        incr_tokens = queue[index].incr_tokens
        weighted = queue[index].hist_tokens * incr_tokens
        # The first of the pass is due first, and its token comes with the pass.
        limit_s = min(self.together_passes * shortest_pass_s(model, queue[index].hist_tokens, parallelism), kept[0][0])
        together: list[int] = []
        for _, _, _, position in kept[1:] if kept[0][1] < limit_s else ():
            task = queue[position]
            incr_tokens += task.incr_tokens
            weighted += task.hist_tokens * task.incr_tokens
            if model.prefill_s(weighted // incr_tokens, incr_tokens, parallelism) > limit_s:
                break
            together.append(position)
        postponed = tuple(position for position in range(index) if position not in together)
        return Pick(index, postponed, tuple(together))

    def _jobs(
        self, queue: Sequence[PrefillTask], parallelism: Parallelism, model: PerformanceModel, now_s: float
    ) -> tuple[list[Job], list[int]]:
        """(those that can be on time, positions of those that cannot), in order of the queue."""
        prefill_s, headroom = model.prefill_s, self.headroom
        jobs: list[Job] = []
        hopeless: list[int] = []
        for position, task in enumerate(queue):
            if headroom * task.slo.ttft_s <= now_s - task.arrival_s:
                hopeless.append(position)
                continue
            time_s = prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
            job = job_of(task, position, time_s, now_s, headroom, self.missed_weight)
            if time_s > job[0]:
                hopeless.append(position)
                continue
            jobs.append(job)
            if len(jobs) == self.window:
                break
        return jobs, hopeless

    def _shortest(
        self, queue: Sequence[PrefillTask], hopeless: Sequence[int], parallelism: Parallelism, model: PerformanceModel
    ) -> int:
        """Position of the hopeless task that takes the least time, of equals the first."""
        first = [(position, queue[position]) for position in hopeless[: self.window]]
        times_s = [model.prefill_s(task.hist_tokens, task.incr_tokens, parallelism) for _, task in first]
        return first[times_s.index(min(times_s))][0]
