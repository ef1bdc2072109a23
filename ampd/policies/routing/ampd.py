"""Adaptive routing (Algorithm 1 of arXiv 2602.14516): slack first, then the cheapest route by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from ampd.policies.base import RoutingSituation, any_of
from ampd.policies.estimates import (
    NO_PREFILL_WORKER,
    able,
    estimate_local,
    estimate_remote,
    index_of_least,
    local,
    towards,
)
from ampd.policies.registry import Policy, register
from ampd.types import RouteDecision, WorkerView


@register("routing", "ampd")
class AmpdRouting(Policy):
    """The paper's rule (its Algorithm 1), and not what AMPD does by default: prefill remotely while prefill workers
    meet TTFT, locally while the decode worker has ITL to spare, else where it is cheapest.

    Reads: windowed TTFT, queue, held prefix and longest context of every prefill worker; windowed ITL and queue of the
    session's decode worker; the round's SLO; prefill and transfer times of the performance model.

    Rule:

    1. `ttft-slack`: visit the prefill workers in random order; the first whose windowed TTFT is at most `alpha` times
       the TTFT target takes the round.
    2. `itl-slack`: otherwise, if the decode worker's windowed ITL is at most `beta` times the ITL target: local.
    3. `cheapest`: otherwise the route with the least queue + prefill + transfer time by the model; all estimates are
       recorded. History that the prefill worker holds already is not moved. Of equal routes local comes first, then a
       prefill worker at random.

    Without a prefill worker that can take the prompt: local, `no-prefill-worker`.

    Limits: a window without samples counts as 0, so an idle or new worker counts as unloaded. Step 1 does not look at
    queues, so a burst shorter than the window can pile up on one worker. Step 3 is as good as the model.

    Example: `--routing ampd`
    """

    help_note: ClassVar[str] = "the paper's Algorithm 1, not the default"

    alpha: float = Field(0.9, gt=0, description="Share of the TTFT target up to which a prefill worker has slack.")
    beta: float = Field(0.85, gt=0, description="Share of the ITL target up to which a decode worker has slack.")

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task, decode = situation.task, situation.decode
        workers = able(task, situation.prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        limit_s = self.alpha * task.slo.ttft_s
        with_slack = [worker for worker in workers if not worker.ttft.count or worker.ttft.mean_s <= limit_s]
        if with_slack:
            # The first hit of a visit in random order is a uniform choice among the hits, with one random number.
            return towards(any_of(with_slack, situation.rng), decode, "ttft-slack")
        if not decode.itl.count or decode.itl.mean_s <= self.beta * task.slo.itl_s:
            return local(decode, "itl-slack")
        return _cheapest(situation, workers)


def _cheapest(situation: RoutingSituation, workers: Sequence[WorkerView]) -> RouteDecision:
    here = estimate_local(situation)
    remote = [estimate_remote(situation, worker) for worker in workers]
    there = remote[index_of_least([estimate.total_s for estimate in remote], situation.rng)]
    best = here if here.total_s <= there.total_s else there
    return RouteDecision(best.route, best.worker_id, "cheapest", (here, *remote))
