"""Arrow's decode dispatch, for a session's first round: fewest running tokens while the token interval is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.binding.least_kv import fits
from ampd.policies.estimates import one_of_least
from ampd.policies.registry import Policy, register
from ampd.policies.rivals.arrow.pools import Pool, pool_of
from ampd.types import PrefillTask, WorkerView


@register("binding", "arrow")
class ArrowBinding(Policy):
    """Bind a session to the decode worker with the fewest running tokens among those that keep the ITL target.

    Reads: each decode worker's batch, its context and windowed ITL, queue and held history, KV memory and longest
    context; step times of the performance model; the round's ITL target.

    Rule: workers whose free KV memory and context length take the whole prompt come first, if there are any. A worker
    has room if its windowed ITL meets the target and its running tokens (the contexts that decode now), this prompt
    included, are at most its maximum: `max_running_tokens`, or, if that is 0, its KV memory and the context at which
    the modelled step meets the target. Workers that have prefills left from their time as prefill workers (pool P->D)
    come after those that have none (D).

    1. The worker of D with the fewest running tokens among those with room.
    2. Otherwise the same in P->D.
    3. Otherwise the one with the fewest running tokens of all.

    Of equals one at random. The changes of roles that go with it are made by `--pools arrow`.

    Limits: asked once per session, as a session stays where it is bound; sessions in a tool call do not count as
    running, though their KV stays. A local prefill of a first round looks like one that is left; there is none with
    `--routing arrow`.

    Example: `--binding arrow`
    """

    max_running_tokens: int = Field(
        0, ge=0, description="Most tokens of context that decode on one worker; 0: what memory and ITL target allow."
    )

    def bind(
        self,
        task: PrefillTask,
        decode: Sequence[WorkerView],
        model: PerformanceModel,
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> str:
        """The chosen worker's id."""
        workers = [worker for worker in decode if fits(worker, task)] or decode
        roomy = [worker for worker in workers if self._has_room(worker, task, model)]
        settled = [worker for worker in roomy if pool_of(worker) is Pool.DECODE]
        candidates = settled or roomy or workers
        return candidates[one_of_least([worker.decode_context_tokens for worker in candidates], rng)].worker_id

    def _has_room(self, worker: WorkerView, task: PrefillTask, model: PerformanceModel) -> bool:
        if worker.itl.count and worker.itl.mean_s > task.slo.itl_s:
            return False
        running_tokens = worker.decode_context_tokens + task.context_tokens
        if self.max_running_tokens:
            return running_tokens <= self.max_running_tokens
        if 0 < worker.kv_capacity_tokens < running_tokens:
            return False
        return model.decode_step_s(worker.decode_batch + 1, running_tokens, worker.parallelism) <= task.slo.itl_s
