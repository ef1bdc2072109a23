"""The first round remote, the later ones local (ConServe, arXiv 2606.01839)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, RouteDecision, WorkerView


@register("routing", "first-remote")
class FirstRemote(Policy):
    """Prefill a session's first round remotely, and every later one on the decode worker that has its KV.

    Reads: whether the round has history; queue, held prefix and longest context of every prefill worker; prefill times
    of the performance model, for the queues.

    Rule: `later-round` with history: local. `first-round` without: the prefill worker with the least queued work, of
    equals one at random; the estimates of all prefill workers are recorded. Without a prefill worker that can take the
    prompt: local, `no-prefill-worker`.

    Limits: it knows neither load, targets nor the length of an increment. A session whose KV was evicted or whose
    context was rewritten from the start counts as new.

    Example: `--routing first-remote`
    """

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
        workers = able(task, prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        if task.hist_tokens:
            return local(decode, "later-round")
        return least_queued(task, decode, workers, model, rng, "first-round")
