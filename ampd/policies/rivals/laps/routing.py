"""Length-aware routing after LAPS (arXiv 2601.11589): short and long prefills do not wait for each other."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local
from ampd.policies.registry import Policy, register
from ampd.policies.rivals.laps.pools import LONG, SHORT
from ampd.types import PrefillTask, RouteDecision, WorkerView


@register("routing", "laps")
class LapsRouting(Policy):
    """Prefill every round on a prefill worker of the lane for its length. Goes with `--pools laps`.

    Reads: lane, queue, held prefix and longest context of every prefill worker; prefill and transfer times of the
    performance model.

    Rule: a round with at most `boundary_tokens` new tokens is short. Of the prefill workers of its lane the one with
    the least queued work takes it, of equals one at random; reason `short` or `long`. If none of the lane can take the
    prompt, all prefill workers are asked: `no-lane`. The estimates of those that were asked are recorded. Without a
    prefill worker that can take the prompt: local, `no-prefill-worker`.

    Limits: the boundary between memory-bound and compute-bound prefills depends on the hardware and on the history
    (150 to 512 tokens are typical); here it is a number. Without the pools policy nobody has a lane, and this is
    `always-remote`.

    Example: `--routing laps`
    """

    boundary_tokens: int = Field(256, ge=1, description="Most new tokens of a short prefill.")

    def route(
        self,
        task: PrefillTask,
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        model: PerformanceModel,
        now_s: float,  # noqa: ARG002
        rng: random.Random,
    ) -> RouteDecision:
        """Decide one round."""
        reason = SHORT if task.incr_tokens <= self.boundary_tokens else LONG
        workers = able(task, [worker for worker in prefill if worker.lane == reason])
        if not workers:
            reason, workers = "no-lane", able(task, prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        return least_queued(task, decode, workers, model, rng, reason)
