"""Our routing: where the round's prefill is predicted to end first without making another round late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Final

from pydantic import Field

from ampd.policies.base import RoutingSituation
from ampd.policies.estimates import (
    NO_PREFILL_WORKER,
    able,
    as_job,
    history_at,
    history_read_s,
    left_s,
    local,
    on_time,
    prefill_share,
    queue_times,
    queued_in_passes_s,
    shortest_pass_s,
    step_with_s,
)
from ampd.policies.moore_hodgson import weight_lost_to
from ampd.policies.registry import Policy, register
from ampd.types import Role, Route, RouteDecision, RouteEstimate, WorkerView

_ON_TIME: Final = "on-time"
_UNKNOWN: Final = -1.0


@dataclass(slots=True)
class RouteOffer:
    """The prediction for a round at one worker.

    Attributes:
        stretch: how many times longer a prefill takes there, because the decode batch needs its share of the time.
        loss: weight of the rounds now on time at the worker that this round would make late there, once it is known.
    """

    worker: WorkerView
    route: Route
    total_s: float
    prefill_s: float
    queue_s: float
    transfer_s: float = 0.0
    stretch: float = 1.0
    loss: float = _UNKNOWN

    def estimate(self) -> RouteEstimate:
        return RouteEstimate(
            self.route, self.worker.worker_id, self.total_s, self.prefill_s, self.queue_s, self.transfer_s
        )


@register("routing", "predictive")
class PredictiveRouting(Policy):
    """Prefill where the round is predicted to end first, among the workers where it makes no other round late.

    Reads: queue, held tokens of the session, shared prefixes and longest context of every prefill worker; queue,
    decode batch and its context of the session's decode worker and of mixed workers; the round's SLO; all times of
    the performance model.

    Rule:

    1. Every prefill worker that is not mixed offers a time: work in its queue + reading the history that it lacks +
       the prefill. The part of the prompt that it holds for other sessions is neither read nor computed.
    2. The decode worker offers the time that its batch leaves over. A step that takes `step` of a target of `itl`
       leaves `1 - step / (0.92 * itl)` of the time for slices of a prefill. Below `least_share` the worker offers
       nothing, except for a short prefill: a prefill elsewhere ends in a pass here (the hand-over) that pauses the
       batch as long as the shortest prefill, so leaving saves the batch little.
    3. For each of the 8 earliest offers, the rule of the ordering `on-time` predicts which rounds would be late there:
       only this one, if the worker cannot serve it in time. The earliest offer without a loss takes the round
       (`on-time`), else the earliest of those with the least loss (`fewest-late`, or `hopeless` where it is late
       itself).
    4. Mixed workers have a batch of their own to pause. They are asked only if a round becomes late in 3.

    Without a prefill worker that can take the prompt: local, `no-prefill-worker`.

    Limits: it is as good as the performance model, and as the views are fresh. It counts on the slicing `slack` and
    the ordering `on-time`: with whole prefills a local route stalls the batch. Mixed workers alone carry about what
    co-located ones carry, also where a split of roles would carry more.

    Example: `--routing predictive`, with `--ordering on-time` and `--slicing slack`
    """

    least_share: float = Field(
        0.25, gt=0, le=1, description="Least part of a decode worker's time that is worth a long local prefill."
    )
    spread: float = Field(
        0.02, ge=0, description="Offers that differ by less than this share of the TTFT target count as equal."
    )

    TRIES: ClassVar[int] = 8
    """Offers that are checked for rounds that become late."""

    def route(self, situation: RoutingSituation) -> RouteDecision:
        task, decode = situation.task, situation.decode
        workers = able(task, situation.prefill)
        if not workers:
            return local(decode, NO_PREFILL_WORKER)
        own_id, least_share = decode.worker_id, self.least_share
        others = [worker for worker in workers if worker.worker_id != own_id]
        mixed = [worker for worker in others if worker.role is Role.MIXED]
        prefill = [worker for worker in others if worker.role is not Role.MIXED] if mixed else others
        offers = [_remote(situation, worker, least_share) for worker in prefill]
        are_free = not others or any(not worker.decode_batch for worker in prefill)
        here = _local(situation, least_share, are_free)
        if here is not None:
            offers.append(here)
        elif not offers:
            return local(decode, NO_PREFILL_WORKER)
        grain_s, tries = self.spread * task.slo.ttft_s, self.TRIES
        offers = _ranked(offers, grain_s, situation.rng)
        chosen, reason = _choice(situation, offers, tries)
        if mixed and reason != _ON_TIME:
            further = _ranked(_mixed(situation, mixed, least_share), grain_s, situation.rng)
            offers += further
            gain, reason_there = _choice(situation, further, tries) if further else (chosen, reason)
            if reason_there == _ON_TIME:
                chosen, reason = gain, reason_there
        return RouteDecision(chosen.route, chosen.worker.worker_id, reason, _record(chosen, offers))


# Functions and no methods, because compiled code calls a method of a policy as interpreted code does.


def _local(situation: RoutingSituation, least_share: float, are_free: bool) -> RouteOffer | None:
    """The offer of the decode worker. `are_free`: another worker has no decode batch, so that this one may refuse."""
    task, decode, model = situation.task, situation.decode, situation.model
    share = _share(situation, decode, joining=1)
    plain_s = model.prefill_s(task.hist_tokens, task.incr_tokens, decode.parallelism)
    if share < least_share and share <= least_share * _saved(situation, plain_s):
        if are_free:
            return None
        share = least_share
    stretch = 1.0 / share
    prefill_s = plain_s * stretch
    queue_s = queued_in_passes_s(decode, model) * stretch
    transfer_s = history_read_s(situation, decode)
    total_s = queue_s + transfer_s + prefill_s
    return RouteOffer(decode, Route.LOCAL, total_s, prefill_s, queue_s, transfer_s, stretch)


def _remote(situation: RoutingSituation, worker: WorkerView, least_share: float) -> RouteOffer:
    stretch = 1.0
    if worker.decode_batch:  # it was a decode worker a moment ago, and its batch ends soon
        stretch = 1.0 / max(_share(situation, worker), least_share)
    return _remote_in(situation, worker, stretch)


def _mixed(situation: RoutingSituation, workers: Sequence[WorkerView], least_share: float) -> list[RouteOffer]:
    """The offers of mixed workers whose batches leave time over. Their batches stay, as the owner's does."""
    shares = [(worker, _share(situation, worker)) for worker in workers]
    return [_remote_in(situation, worker, 1.0 / share) for worker, share in shares if share >= least_share]


def _remote_in(situation: RoutingSituation, worker: WorkerView, stretch: float) -> RouteOffer:
    known: dict[str, RouteOffer] | None = situation.offers
    if known is not None and worker.worker_id in known:
        return known[worker.worker_id]
    task, model, target = situation.task, situation.model, worker.parallelism
    # Without a call where nothing is shared, because a decision makes an offer per worker.
    hist_tokens = history_at(situation, worker) if situation.shared_tokens else task.hist_tokens
    transfer_s = history_read_s(situation, worker)
    prefill_s = model.prefill_s(hist_tokens, task.context_tokens - hist_tokens, target) * stretch
    queue_s = queued_in_passes_s(worker, model) * stretch
    total_s = queue_s + transfer_s + prefill_s
    offer = RouteOffer(worker, Route.REMOTE, total_s, prefill_s, queue_s, transfer_s, stretch)
    if known is not None:
        known[worker.worker_id] = offer
    return offer


def _share(situation: RoutingSituation, worker: WorkerView, joining: int = 0) -> float:
    """Part of a worker's time that its decode batch leaves over; `joining`: with the task's round in the batch."""
    if not worker.decode_batch:
        return 1.0
    task = situation.task
    step_s = step_with_s(situation.model, worker, joining * task.context_tokens, joining)
    return prefill_share(step_s, task.slo.itl_s)


def _choice(situation: RoutingSituation, offers: Sequence[RouteOffer], tries: int) -> tuple[RouteOffer, str]:
    best, least = offers[0], inf
    for offer in offers[:tries]:
        loss = offer.loss
        if loss == _UNKNOWN:
            loss = offer.loss = _loss(situation, offer)
        if not loss:
            return offer, _ON_TIME
        if loss < least:
            best, least = offer, loss
    is_hopeless = best.prefill_s + best.transfer_s > left_s(situation.task, situation.now_s)
    return best, "hopeless" if is_hopeless else "fewest-late"


def _loss(situation: RoutingSituation, offer: RouteOffer) -> float:
    """Weight of the rounds that would be late at a worker with this round and are not without it, this one included."""
    now_s = situation.now_s
    own = as_job(situation.task, 0, offer.prefill_s + offer.transfer_s, now_s)
    if own.time_s > own.due_s:
        return own.weight  # it gives way to all others
    times_s = queue_times(offer.worker, situation.model).listed_s
    jobs = on_time(offer.worker.queue, times_s, offer.stretch, now_s)
    return weight_lost_to(own._replace(position=len(jobs)), jobs) if jobs else 0.0


def _saved(situation: RoutingSituation, plain_s: float) -> float:
    """The part of a local prefill of `plain_s` seconds that leaving would save the batch: all but the hand-over."""
    hand_over_s = shortest_pass_s(situation.model, situation.task.context_tokens, situation.decode.parallelism)
    return 1.0 - hand_over_s / plain_s if plain_s > hand_over_s else 0.0


def _ranked(offers: Sequence[RouteOffer], grain_s: float, rng: random.Random) -> list[RouteOffer]:
    """The offers by time. Offers that differ by less than `grain_s` are in random order."""
    dice = rng.random
    ranks = []
    for place, offer in enumerate(offers):
        throw = dice()
        ranks.append((offer.total_s + throw * grain_s, throw, place))
    ranks.sort()
    return [offers[place] for _, _, place in ranks]


def _record(chosen: RouteOffer, offers: Sequence[RouteOffer]) -> tuple[RouteEstimate, ...]:
    """The chosen offer's estimate, and the best of the other route."""
    other = next((offer for offer in offers if offer.route is not chosen.route), None)
    return (chosen.estimate(), other.estimate()) if other else (chosen.estimate(),)
