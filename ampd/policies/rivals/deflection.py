"""Load-aware deflection (arXiv 2607.02043): local where a schedule of chunks beats the best prefill worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.chunks import chunked_s
from ampd.policies.estimates import NO_PREFILL_WORKER, able, estimate_local, estimate_remote, local, one_of_least
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, Route, RouteDecision, RouteEstimate, WorkerView


@register("routing", "deflection")
class Deflection(Policy):
    """Prefill locally where that is faster than the best prefill worker although the running decodes keep their ITL.

    Reads: queue, held prefix and longest context of every prefill worker; queue, decode batch and its context of the
    session's decode worker; the round's ITL target; prefill, step and transfer times of the performance model.

    Rule: the remote time is the least sum of queue, prefill and transfer over the prefill workers, of equals one at
    random. The local time is that of a schedule which cuts what is queued there, and then this round, into the largest
    chunks that fit between two decode steps within the ITL target.

    1. `deflected`: local if such a schedule exists and is faster; its time is recorded with the remote ones.
    2. `itl`: remote because the batch leaves no room for chunks of `floor_tokens`.
    3. `faster`: remote because no schedule is faster; the remote estimates are recorded.

    Without a prefill worker that can take the prompt: local, `no-prefill-worker`. To be used with
    `--slicing itl-chunks`, which executes the schedule.

    Limits: only the session's own decode worker is looked at, as its KV is there. The round's ITL target stands for
    those of the batch, and the batch is taken to stay as it is. It compares times, not targets: a round may be
    deflected that would have met its TTFT remotely.

    Example: `--routing deflection`, with `--slicing itl-chunks`
    """

    floor_tokens: int = Field(16, ge=1, description="Smallest chunk, beside the last one, that a schedule may have.")

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
        workers = [worker for worker in able(task, prefill) if worker.worker_id != decode.worker_id]
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        remote = tuple([estimate_remote(task, decode, worker, model) for worker in workers])
        best = remote[one_of_least([estimate.total_s for estimate in remote], rng)]
        # Uncut it is fastest: most rounds that belong elsewhere need no schedule to see it.
        if estimate_local(task, decode, model).total_s >= best.total_s:
            return RouteDecision(best.route, best.worker_id, "faster", remote)
        here = self._scheduled(task, decode, best.total_s, model)
        if here is None:
            return RouteDecision(best.route, best.worker_id, "itl", remote)
        if here.total_s >= best.total_s:
            return RouteDecision(best.route, best.worker_id, "faster", remote)
        return RouteDecision(Route.LOCAL, decode.worker_id, "deflected", (here, *remote))

    def _scheduled(
        self, task: PrefillTask, decode: WorkerView, until_s: float, model: PerformanceModel
    ) -> RouteEstimate | None:
        """The local route in chunks, exact below `until_s`; None if the batch leaves no room for it."""
        parallelism, itl_slo_s = decode.parallelism, task.slo.itl_s
        step_s = model.decode_step_s(decode.decode_batch, decode.decode_context_tokens, parallelism)
        step_s = step_s if decode.decode_batch else 0.0
        queue_s = chunked_s(decode.queue, step_s, itl_slo_s, self.floor_tokens, until_s, parallelism, model)
        left_s = until_s - queue_s
        prefill_s = chunked_s((task,), step_s, itl_slo_s, self.floor_tokens, left_s, parallelism, model)
        total_s = queue_s + prefill_s
        if total_s == float("inf"):
            return None
        return RouteEstimate(Route.LOCAL, decode.worker_id, total_s, prefill_s, queue_s, 0.0)
