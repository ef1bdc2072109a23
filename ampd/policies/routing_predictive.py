"""Our routing: where the round's own prefill ends first without making anybody else late, by prediction."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import NO_PREFILL_WORKER, able, local
from ampd.policies.keeping import job_of, keep
from ampd.policies.registry import Policy, register
from ampd.types import PrefillTask, Route, RouteDecision, RouteEstimate, WorkerView


@dataclass(frozen=True, slots=True)
class Offer:
    """What one worker would make of a round.

    Attributes:
        stretch: how many times longer a prefill takes there, because the decode batch needs its share of the time.
    """

    worker: WorkerView
    estimate: RouteEstimate
    stretch: float


@register("routing", "predictive")
class PredictiveRouting(Policy):
    """Prefill where the round is predicted to end first, among the places where nobody becomes late by it.

    Reads: queue, held prefix and longest context of every prefill worker; queue, decode batch and its context, windowed
    ITL of the session's decode worker; the round's SLO; all times of the performance model. No windowed TTFT: what has
    completed says little in a burst, what is queued says it now.

    Rule:

    1. Every prefill worker offers: work in its queue + reading the history that it lacks + the prefill.
    2. The decode worker offers what its batch leaves over. A step that takes `step` of a target of `itl` leaves
       `1 - step / (itl_share * itl)` of the time for slices of a prefill, so queue and prefill take that much longer.
       What the model does not see (hand-overs of rounds that were prefilled elsewhere, bursts) shows in the measured
       ITL: from `1 - fade` of the target on, the share shrinks in proportion, to nothing at the target. Below
       `least_share` the worker offers nothing.
    3. For the `tries` earliest offers it is checked, by the rule of the ordering `on-time`, how many of the rounds
       there that are still on time, this one included, would have to be given up. The earliest offer without a loss
       takes the round (`on-time`), else the one with the least loss (`fewest-late`). A round that no offer can serve in
       time goes where it ends first (`hopeless`): there it is run in what time is left over.

    The record holds the best offer of each route. Without a prefill worker that can take the prompt: local,
    `no-prefill-worker`.

    Limits: it is as good as the performance model and as the views are fresh; replicas with the same old view choose
    the same worker, which `spread` softens. It counts on the slicing `slack` and the ordering `on-time`: with whole
    prefills a local route stalls the batch.

    Example: `--routing predictive`, with `--ordering on-time` and `--slicing slack`
    """

    headroom: float = Field(0.95, gt=0, le=1, description="Share of the TTFT target that is planned with.")
    itl_share: float = Field(0.92, gt=0, le=1, description="Share of the ITL target that local prefills may use up.")
    least_share: float = Field(
        0.25, gt=0, le=1, description="Least part of a decode worker's time that is worth a local prefill."
    )
    fade: float = Field(
        0.7, ge=0, le=1, description="Last part of the ITL target in which a measured ITL makes local prefills rarer."
    )
    missed_weight: float = Field(
        0.5, gt=0, le=1, description="Weight of a round whose session has missed a target before."
    )
    tries: int = Field(8, ge=1, description="Offers that are checked for rounds that become late.")
    spread: float = Field(
        0.02, ge=0, description="Offers that differ by less than this share of the TTFT target count as equal."
    )

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
        offers = [_remote(task, decode, worker, model) for worker in workers if worker is not decode]
        here = self._local(task, decode, model)
        if here is not None:
            offers.append(here)
        elif not offers:
            return local(decode, NO_PREFILL_WORKER)
        grain_s = self.spread * task.slo.ttft_s
        offers.sort(key=lambda offer: offer.estimate.total_s + rng.random() * grain_s)
        chosen, reason = self._choose(task, offers, model, now_s)
        return RouteDecision(chosen.estimate.route, chosen.worker.worker_id, reason, _record(chosen, offers))

    def _local(self, task: PrefillTask, decode: WorkerView, model: PerformanceModel) -> Offer | None:
        stretch = 1.0
        if decode.decode_batch:
            context_tokens = decode.decode_context_tokens + task.context_tokens
            step_s = model.decode_step_s(decode.decode_batch + 1, context_tokens, decode.parallelism)
            share = 1.0 - step_s / (self.itl_share * task.slo.itl_s)
            share *= self._unspent(decode, task.slo.itl_s)
            if share < self.least_share:
                return None
            stretch = 1.0 / share
        prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, decode.parallelism) * stretch
        queue_s = _queue_s(decode, model) * stretch
        estimate = RouteEstimate(Route.LOCAL, decode.worker_id, prefill_s + queue_s, prefill_s, queue_s, 0.0)
        return Offer(decode, estimate, stretch)

    def _unspent(self, decode: WorkerView, itl_slo_s: float) -> float:
        """1 while the measured ITL is far from its target, 0 at the target."""
        if not self.fade or not decode.itl.count:
            return 1.0
        return min(max((1.0 - decode.itl.mean_s / itl_slo_s) / self.fade, 0.0), 1.0)

    def _choose(
        self, task: PrefillTask, offers: Sequence[Offer], model: PerformanceModel, now_s: float
    ) -> tuple[Offer, str]:
        left_s = self.headroom * task.slo.ttft_s - (now_s - task.arrival_s)
        best: Offer | None = None
        least = float("inf")
        for offer in offers[: self.tries]:
            if offer.estimate.prefill_s + offer.estimate.transfer_s > left_s:
                continue
            loss = self._loss(task, offer, model, now_s)
            if not loss:
                return offer, "on-time"
            if loss < least:
                best, least = offer, loss
        return (best, "fewest-late") if best else (offers[0], "hopeless")

    def _loss(self, task: PrefillTask, offer: Offer, model: PerformanceModel, now_s: float) -> float:
        """Weight of the rounds on time at a worker that its taking this one would make late."""
        estimate, worker = offer.estimate, offer.worker
        jobs = []
        for position, other in enumerate(worker.queue):
            time_s = model.prefill_s(other.hist_tokens, other.incr_tokens, worker.parallelism) * offer.stretch
            job = job_of(other, position, time_s, now_s, self.headroom, self.missed_weight)
            if time_s <= job[0]:
                jobs.append(job)
        own_s = estimate.prefill_s + estimate.transfer_s
        own = job_of(task, len(worker.queue), own_s, now_s, self.headroom, self.missed_weight)
        if not jobs:
            return 0.0
        _, before = keep(jobs)
        _, after = keep([*jobs, own])
        return max(after - before, 0.0)


def _remote(task: PrefillTask, decode: WorkerView, worker: WorkerView, model: PerformanceModel) -> Offer:
    missing_tokens = max(task.hist_tokens - worker.held_tokens.get(task.session_id, 0), 0)
    transfer_s = model.kv_transfer_s(missing_tokens, decode.parallelism, worker.parallelism) if missing_tokens else 0.0
    prefill_s = model.prefill_s(task.hist_tokens, task.incr_tokens, worker.parallelism)
    queue_s = _queue_s(worker, model)
    total_s = queue_s + transfer_s + prefill_s
    return Offer(
        worker, RouteEstimate(Route.REMOTE, worker.worker_id, total_s, prefill_s, queue_s, transfer_s), stretch=1.0
    )


def _queue_s(worker: WorkerView, model: PerformanceModel) -> float:
    """Work queued at a worker; short prefills share passes, so that only one of them pays a pass's fixed time."""
    if not worker.queue:
        return 0.0
    prefill_s, parallelism = model.prefill_s, worker.parallelism
    fixed_s = prefill_s(0, 1, parallelism)
    total_s = 0.0
    is_shared = False
    for task in worker.queue:
        time_s = prefill_s(task.hist_tokens, task.incr_tokens, parallelism)
        if time_s < 2.0 * fixed_s:
            time_s = max(time_s - fixed_s, 0.0) if is_shared else time_s
            is_shared = True
        total_s += time_s
    return total_s


def _record(chosen: Offer, offers: Sequence[Offer]) -> tuple[RouteEstimate, ...]:
    """The chosen offer's estimate, and the best of the other route."""
    route = chosen.estimate.route
    other = next((offer.estimate for offer in offers if offer.estimate.route is not route), None)
    return (chosen.estimate, other) if other else (chosen.estimate,)
