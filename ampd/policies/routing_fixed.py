"""Routing policies that always take the same kind of route: the baselines."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import NO_PREFILL_WORKER, able, estimate_remote, local, one_of_least
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, RouteDecision, WorkerView


@register("routing", "always-remote")
class AlwaysRemote(Policy):
    """Prefill every round on a prefill worker, the one with the least queued work (stock prefill-decode
    disaggregation).

    Reads: queue, held prefix and longest context of every prefill worker; prefill and transfer times of the
    performance model.

    Rule: the least sum of modelled prefill times over the queue, of equals one at random. Reason `always-remote`; the
    estimates of all prefill workers are recorded. Without a prefill worker that can take the prompt: local,
    `no-prefill-worker`.

    Limits: the history travels in every round, however long it is and however small the increment.

    Example: `--routing always-remote`
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
        estimates = tuple(estimate_remote(task, decode, worker, model) for worker in workers)
        best = estimates[one_of_least([estimate.queue_s for estimate in estimates], rng)]
        return RouteDecision(best.route, best.worker_id, "always-remote", estimates)


@register("routing", "always-local")
class AlwaysLocal(Policy):
    """Prefill every round on the session's decode worker (co-located serving).

    Reads: only whether there is a prefill worker that could take the prompt, to name the reason: `always-local`, or
    `no-prefill-worker` as with every other policy.

    Limits: every prefill pauses the decodes of that worker; prefill workers stay idle.

    Example: `--routing always-local`
    """

    def route(
        self,
        task: PrefillTask,
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        model: PerformanceModel,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
        rng: random.Random,  # noqa: ARG002
    ) -> RouteDecision:
        """Decide one round."""
        return local(decode, "always-local" if able(task, prefill) else NO_PREFILL_WORKER)
