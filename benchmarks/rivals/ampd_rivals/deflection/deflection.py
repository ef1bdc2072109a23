"""Load-aware deflection (arXiv 2607.02043): local where a schedule of chunks beats the best prefill worker."""

from __future__ import annotations

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import NO_PREFILL_WORKER, able, estimate_local, estimate_remote, index_of_least, local
from ampd.policies.registry import Policy, register
from ampd.types import Route, RouteDecision, RouteEstimate
from ampd_rivals.deflection.chunks import chunked_s


@register("routing", "deflection")
class Deflection(Policy):
    """Prefill locally where that is faster than the best prefill worker although the running decodes keep their ITL.

    Reads: queue, held prefix and longest context of every prefill worker; queue, decode batch and its context of the
    session's decode worker; the round's ITL target; prefill, step and transfer times of the performance model.

    Rule: the remote time is the least sum of queue, prefill and transfer over the prefill workers (of equals a random
    one). The local time is that of a schedule which cuts the queue there, and then this round, into the largest chunks
    that fit between two decode steps within the ITL target.

    1. `deflected`: local if such a schedule exists and is faster; its time is recorded with the remote ones.
    2. `itl`: remote because the batch leaves no room for chunks of 16 tokens.
    3. `faster`: remote because no schedule is faster; the remote estimates are recorded.

    Without a prefill worker that can take the prompt: local, `no-prefill-worker`. To be used with
    `--slicing itl-chunks`, which executes the schedule.

    Limits: only the session's own decode worker is a local route, because it has the session's KV. The ITL target of
    the round stands for those of the batch, and the batch is taken to stay as it is. It compares times, not targets, so
    it may deflect a round that would have met its TTFT remotely.

    Example: `--routing deflection`, with `--slicing itl-chunks`
    """

    def route(self, situation: RoutingSituation) -> RouteDecision:
        decode = situation.decode
        workers = [worker for worker in able(situation.task, situation.prefill) if worker.worker_id != decode.worker_id]
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        remote = tuple([estimate_remote(situation, worker) for worker in workers])
        best = remote[index_of_least([estimate.total_s for estimate in remote], situation.rng)]
        # Uncut it is fastest, so most rounds that belong elsewhere need no schedule.
        if estimate_local(situation).total_s >= best.total_s:
            return RouteDecision(best.route, best.worker_id, "faster", remote)
        here = self._scheduled(situation, best.total_s)
        if here is None:
            return RouteDecision(best.route, best.worker_id, "itl", remote)
        if here.total_s >= best.total_s:
            return RouteDecision(best.route, best.worker_id, "faster", remote)
        return RouteDecision(Route.LOCAL, decode.worker_id, "deflected", (here, *remote))

    def _scheduled(self, situation: RoutingSituation, until_s: float) -> RouteEstimate | None:
        """The local route in chunks, exact below `until_s`; None if the batch leaves no room for it."""
        task, decode, model = situation.task, situation.decode, situation.model
        parallelism, itl_slo_s = decode.parallelism, task.slo.itl_s
        step_s = model.decode_step_s(decode.decode_batch, decode.decode_context_tokens, parallelism)
        step_s = step_s if decode.decode_batch else 0.0
        queue_s = chunked_s(decode.queue, step_s, itl_slo_s, until_s, parallelism, model)
        left_s = until_s - queue_s
        prefill_s = chunked_s((task,), step_s, itl_slo_s, left_s, parallelism, model)
        total_s = queue_s + prefill_s
        if total_s == float("inf"):
            return None
        return RouteEstimate(Route.LOCAL, decode.worker_id, total_s, prefill_s, queue_s, 0.0)
