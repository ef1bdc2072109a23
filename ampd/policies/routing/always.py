"""Routing policies that always take the same kind of route: the baselines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local, towards
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, RouteDecision, WorkerView


@register("routing", "always-remote")
class AlwaysRemote(Policy):
    """Prefill every round on a prefill worker (stock prefill-decode disaggregation).

    Reads: queue, held prefix and longest context of every prefill worker; prefill and transfer times of the
    performance model. With `choice=random` only which prefill workers can take the prompt.

    Rule: with `choice=least-queued` the least sum of modelled prefill times over the queue, of equals one at random;
    the estimates of all prefill workers are recorded. With `choice=random` any of them, all equally likely. Reason
    `always-remote`. Without a prefill worker that can take the prompt: local, `no-prefill-worker`.

    Limits: the history travels in every round, however long it is and however small the increment. At random, queues
    grow apart although their workers get equal shares.

    Example: `--routing always-remote`, or `always-remote(choice=random)`
    """

    choice: Literal["least-queued", "random"] = Field(
        "least-queued", description="How a prefill worker is chosen: `least-queued` or `random`."
    )

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
        if self.choice == "random":
            return towards(rng.choice(workers), decode, "always-remote")
        return least_queued(task, decode, workers, model, rng, "always-remote")


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
