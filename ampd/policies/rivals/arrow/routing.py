"""Arrow's prefill dispatch: act on the predicted TTFT, settled prefill workers before those that still decode."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import NO_PREFILL_WORKER, able, estimate_remote, local, one_of_least
from ampd.policies.registry import Policy, register
from ampd.policies.rivals.arrow.pools import Pool, pool_of
from ampd.types import PrefillTask, RouteDecision, RouteEstimate, WorkerView


@register("routing", "arrow")
class ArrowRouting(Policy):
    """Prefill where the predicted TTFT is least, on workers that still decode only if the target needs them.

    Reads: queue, held prefix, longest context and decode batch of every prefill worker; prefill and transfer times of
    the performance model; the round's arrival and TTFT target.

    Rule: prefill workers without a decode batch are pool P; those that still have one, from their time as decode
    workers, are pool D->P. The predicted TTFT is the time since arrival and the sum of queue, prefill and transfer; of
    equals one at random.

    1. `prefill`: the worker of P with the least predicted TTFT, if that meets the target.
    2. `decode-to-prefill`: otherwise the same in D->P, if that meets the target.
    3. `least-delay`: otherwise the worker of P with the least; where P is empty, that of D->P.

    The estimates of all prefill workers are recorded. Without a prefill worker that can take the prompt: local,
    `no-prefill-worker`. The changes of roles that go with it are made by `--pools arrow`.

    Limits: a session stays bound to its decode worker, so its round is only local if that worker is a prefill worker
    now. A long decode batch makes prefills at a worker that still decodes slower than predicted.

    Example: `--routing arrow`, with `--binding arrow --pools arrow`
    """

    def route(
        self,
        task: PrefillTask,
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        model: PerformanceModel,
        now_s: float,
        rng: random.Random,
    ) -> RouteDecision:
        """Decide one round."""
        workers = able(task, prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        estimates = tuple([estimate_remote(task, decode, worker, model) for worker in workers])
        left_s = task.slo.ttft_s - max(now_s - task.arrival_s, 0.0)
        settled = _least(Pool.PREFILL, workers, estimates, rng)
        if settled and settled.total_s <= left_s:
            return RouteDecision(settled.route, settled.worker_id, "prefill", estimates)
        changed = _least(Pool.TO_PREFILL, workers, estimates, rng)
        if changed and changed.total_s <= left_s:
            return RouteDecision(changed.route, changed.worker_id, "decode-to-prefill", estimates)
        best = settled or changed
        assert best is not None, "every prefill worker is in one of the two pools"
        return RouteDecision(best.route, best.worker_id, "least-delay", estimates)


def _least(
    pool: Pool, workers: Sequence[WorkerView], estimates: Sequence[RouteEstimate], rng: random.Random
) -> RouteEstimate | None:
    """The pool's worker with the least predicted TTFT; None if the pool is empty."""
    own = [one for one, worker in zip(estimates, workers, strict=True) if pool_of(worker) is pool]
    return own[one_of_least([one.total_s for one in own], rng)] if own else None
