"""Every prefill on a prefill worker: stock prefill-decode disaggregation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ampd.policies.base import RoutingSituation, any_of
from ampd.policies.estimates import NO_PREFILL_WORKER, able, least_queued, local, towards
from ampd.policies.registry import Policy, register
from ampd.types import RouteDecision


@register("routing", "always-remote")
class AlwaysRemote(Policy):
    """Prefill every round on a prefill worker (stock prefill-decode disaggregation).

    Reads: queue, held prefix and longest context of every prefill worker; prefill and transfer times of the
    performance model. With `choice=random` only which prefill workers can take the prompt.

    Rule: with `choice=least-queued` the least sum of modelled prefill times over the queue (of equals a random one);
    the estimates of all prefill workers are recorded. With `choice=random` any of them, all equally likely. Reason
    `always-remote`. Without a prefill worker that can take the prompt: local, `no-prefill-worker`.

    Limits: the history travels in every round, however long it is and however small the increment. At random, queues
    grow apart although their workers get equal shares.

    Example: `--routing always-remote`, or `always-remote(choice=random)`
    """

    choice: Literal["least-queued", "random"] = Field(
        "least-queued", description="How a prefill worker is chosen: `least-queued` or `random`."
    )

    def route(self, situation: RoutingSituation) -> RouteDecision:
        workers = able(situation.task, situation.prefill)
        if not workers:
            return local(situation.decode, NO_PREFILL_WORKER)
        if self.choice == "random":
            return towards(any_of(workers, situation.rng), situation.decode, "always-remote")
        return least_queued(situation, workers, "always-remote")
