"""TaiChi's length-aware prefill scheduling."""

from __future__ import annotations

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import NO_PREFILL_WORKER, able, history_at, history_read_s, index_of_least, local
from ampd.policies.registry import register
from ampd.types import Role, Route, RouteDecision, RouteEstimate, WorkerView
from ampd_rivals.taichi.chunks import ChunkSizes


@register("routing", "taichi")
class TaiChiRouting(ChunkSizes):
    """Prefill on the slow, decode-heavy worker as long as TTFT allows it, else on a prefill-heavy one.

    After TaiChi (arXiv 2508.01989), length-aware prefill scheduling.

    Reads: queue, decode batch and its context, held prefix and longest context of every prefill or mixed worker; the
    same of the session's decode worker; the round's TTFT target; prefill, step and transfer times of the performance
    model.

    What the source says: the time to the first token is projected for each instance, from its queue, the prefill and
    the transfer of KV. The prefill goes to the least capable instance that still meets the target, so that short
    prefills go to decode-heavy instances, and prefill-heavy ones stay free for long prefills.

    Rule:

    1. `degraded`: the session's own worker is a decode worker, and its projected time is within what is left of the
       target: local.
    2. `prefill-heavy`: otherwise the least projected time among the prefill and mixed workers that meet the target. The
       own worker is one of them if it is mixed. Of equal workers it takes a random one.
    3. `late`: no worker meets the target. The least projected time of all.

    Without a worker that takes prefills and can take this prompt: local, `no-prefill-worker`.

    Our reading: the own worker is the only decode-heavy candidate, because it has the session's history, which the
    source's requests of one round do not have. All prefill-heavy workers count as equally capable.

    Limits: the times are those of the present batch. The chunk sizes must be those of the slicing.

    Example: `--routing taichi`, with `--binding taichi` and `--slicing taichi`
    """

    def route(self, situation: RoutingSituation) -> RouteDecision:
        own = situation.decode
        heavy = [worker for worker in able(situation.task, situation.prefill) if worker.worker_id != own.worker_id]
        if not heavy:
            return local(own, NO_PREFILL_WORKER)
        left_s = situation.task.arrival_s + situation.task.slo.ttft_s - situation.now_s
        here = self._projected(situation, own)
        estimates = (here, *[self._projected(situation, worker) for worker in heavy])
        if own.role is Role.DECODE and here.total_s <= left_s:
            return local(own, "degraded", estimates)
        capable = [each for each in estimates[own.role is Role.DECODE :] if each.total_s <= left_s]
        among = capable or estimates
        best = among[index_of_least([each.total_s for each in among], situation.rng)]
        return RouteDecision(best.route, best.worker_id, "prefill-heavy" if capable else "late", estimates)

    def _projected(self, situation: RoutingSituation, worker: WorkerView) -> RouteEstimate:
        task, own, model = situation.task, situation.decode, situation.model
        hist_tokens = history_at(situation, worker)
        prefill_s = self.prefill_s(worker, hist_tokens, task.context_tokens - hist_tokens, model)
        queue_s = self.queued_s(worker, model)
        if worker.worker_id == own.worker_id:
            return RouteEstimate(Route.LOCAL, own.worker_id, queue_s + prefill_s, prefill_s, queue_s, 0.0)
        transfer_s = history_read_s(situation, worker)
        total_s = queue_s + transfer_s + prefill_s
        return RouteEstimate(Route.REMOTE, worker.worker_id, total_s, prefill_s, queue_s, transfer_s)
