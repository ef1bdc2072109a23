"""Whether a round is taken at all: by its predicted wait, before it is entered in any queue.

Under a lasting overload a queue without a bound fills with rounds that can no longer meet their targets. A refusal
with a time to come back costs next to nothing, and the rounds that are taken meet their targets. Rounds of sessions
that are in progress come first, because the work that was spent on such a session is lost if it ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import prefill_share, queued_in_passes_s, step_with_s
from ampd.types import PrefillTask, Slo, WorkerView

MAX_ROUNDS = 1024
"""Most rounds in progress at one coordinator; the default of the live graph. This many streams give far more tokens per
second than one coordinator can pass on."""

NEW_WAIT_SHARE = 0.25
"""Share of the longest wait that is left for the first round of a new session, its own prefill included."""

_OWN_PREFILL_SHARE = 0.5
"""Most of that share that its own prefill takes away. Otherwise a long prompt would need an empty queue."""

NEW_ROUNDS_SHARE = 0.75
"""Share of the rounds in progress that new sessions may fill."""

PATIENCE = 2.0
"""Longest waits after which a worker gives up a prefill that waits. Its round was admitted, but others went first."""

OUTPUT_PATIENCE = 10.0
"""Times as long waits a round whose output has begun, because its client would lose what it has."""

_LONGEST_RETRY_S = 60.0
_JITTER = 1.0
"""Largest extra wait of a refused client, as a share, so that refused clients do not come back at the same moment."""
_LEAST_TIME_SHARE = 0.1
"""Least share of a decode worker's time that its batch is expected to leave to prefills. Routing avoids a worker below
a quarter, but a round that is there already does advance, so its wait is not counted as endless."""
_SLOW_STEPS = 2.0
"""Decode steps of a round alone that a batch's step may always take, because an ITL target may be out of reach."""


class RefusalReason(StrEnum):
    """Why a round is not taken: the queues, the decode batches, or the rounds in progress at the coordinator."""

    WAIT = "wait"
    DECODE_BATCH = "decode-batch"
    ROUNDS = "rounds"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A round that is not taken. `retry_after_s`: when it is predicted to have a chance."""

    reason: RefusalReason
    message: str
    retry_after_s: float


@dataclass(slots=True, kw_only=True)
class AdmissionSituation:
    """A round is about to be entered in the queue of a worker.

    Attributes:
        is_running: its session is in progress, so that a refusal would lose work.
        decode: the worker that owns its session, or would own it.
        prefill: the worker that the routing policy chose; the same one if the route is local.
        rounds: rounds in progress at this coordinator, without this one.
        now_s: on the clock of the arrivals in the queues.
    """

    prompt_tokens: int
    is_running: bool
    decode: WorkerView
    prefill: WorkerView
    rounds: int
    now_s: float


def is_in_progress(session_id: str, owners: Iterable[WorkerView], *, is_bound: bool) -> bool:
    """Whether a session is in progress, so that its next round comes before those of new sessions.

    Args:
        owners: the workers that own sessions, if the coordinator does not know all bindings. A session that another
            coordinator serves is in progress if one of them holds KV of it.
        is_bound: the coordinator knows its owner.
    """
    return is_bound or any(session_id in worker.held_tokens for worker in owners)


def patience_s(task: PrefillTask, graph_slo: Slo, max_wait: float) -> float:
    """Seconds for which a prefill may wait in the queue of one worker; infinite if `max_wait` is 0."""
    if not max_wait:
        return math.inf
    return PATIENCE * max_wait * max(task.slo.ttft_s, graph_slo.ttft_s) * (OUTPUT_PATIENCE if task.has_output else 1.0)


class Admission:
    """Decides whether a round is taken. Live and simulated coordinators ask the same object.

    A round of a running session is refused if the worker that would prefill it has more than `max_wait` TTFT targets of
    work to do before. The policies have chosen the workers, so that other workers would not serve it sooner.

    A first round is refused in three more cases: if a quarter of that is less than the work before it and its own
    prefill, if a round there has waited beyond its target, and if the decode batch with it would step slower than its
    ITL target. The second case is what holds 90 % of the rounds in time under any load: refused clients come back and
    fill each gap in the queue, and a session that enters a gap brings its later rounds with it.

    The targets are the graph's. A round's own ones do not count: a tight one would turn a round away that would
    otherwise be served late, and loose ones would let new sessions in before rounds of running ones.

    Args:
        max_wait: in TTFT targets; 0: nothing is refused because of a wait or a decode batch.
        max_rounds: in progress at a coordinator; 0: any number.
        slo: the graph's targets.
        rng: spreads the times at which refused clients come back.
    """

    def __init__(self, max_wait: float, max_rounds: int, model: PerformanceModel, slo: Slo, rng: random.Random) -> None:
        self._max_wait = max_wait
        self._max_rounds = max_rounds
        self._model = model
        self._slo = slo
        self._rng = rng

    def refusal(self, situation: AdmissionSituation) -> Refusal | None:
        """Why the round is not taken; None: it is."""
        if refusal := self._over_rounds(situation):
            return refusal
        if not self._max_wait:
            return None
        try:
            refusal = self._over_wait(situation)
            if refusal is None and not situation.is_running:
                refusal = self._over_batch(situation)
        except UserError:
            return None  # the performance model lacks the parallelism of a worker
        return refusal

    def _over_rounds(self, situation: AdmissionSituation) -> Refusal | None:
        limit = self._max_rounds if situation.is_running else max(1, int(NEW_ROUNDS_SHARE * self._max_rounds))
        if not self._max_rounds or situation.rounds < limit:
            return None
        message = f"{situation.rounds} rounds are in progress at this coordinator, which takes {limit} {_of(situation)}"
        return self._refused(RefusalReason.ROUNDS, message, self._slo.ttft_s)

    def _over_wait(self, situation: AdmissionSituation) -> Refusal | None:
        limit_s, wait_s = self._longest_wait_s(situation), self._wait_s(situation)
        if wait_s > limit_s:
            message = f"the predicted wait is {wait_s:.1f} s, the longest one {_of(situation)} is {limit_s:.1f} s"
            return self._refused(RefusalReason.WAIT, message, wait_s - limit_s)
        if not situation.is_running and any(self._is_overdue(task, situation) for task in situation.prefill.queue):
            message = "a round of another session waits beyond its TTFT target"
            return self._refused(RefusalReason.WAIT, message, wait_s)
        return None

    def _longest_wait_s(self, situation: AdmissionSituation) -> float:
        longest_s = self._max_wait * self._slo.ttft_s
        if situation.is_running:
            return longest_s
        longest_s *= NEW_WAIT_SHARE
        own_s = self._model.prefill_s(0, situation.prompt_tokens, situation.prefill.parallelism)
        return longest_s - min(own_s, _OWN_PREFILL_SHARE * longest_s)

    def _is_overdue(self, task: PrefillTask, situation: AdmissionSituation) -> bool:
        """Whether others made a round late. A long prompt may be late because of its own prefill."""
        overdue_s = situation.now_s - task.arrival_s - max(task.slo.ttft_s, self._slo.ttft_s)
        if overdue_s <= 0.0:
            return False
        return overdue_s > self._model.prefill_s(task.hist_tokens, task.incr_tokens, situation.prefill.parallelism)

    def _over_batch(self, situation: AdmissionSituation) -> Refusal | None:
        excess = self._step_excess(situation)
        if excess <= 1.0:
            return None
        message = f"the decode batch is full: with this round, a step takes {excess:.1f} times the ITL target"
        return self._refused(RefusalReason.DECODE_BATCH, message, self._slo.ttft_s)

    def _wait_s(self, situation: AdmissionSituation) -> float:
        """The work in the queue. It takes longer where a decode batch needs its share of the time."""
        worker, model = situation.prefill, self._model
        queued_s = queued_in_passes_s(worker, model)
        if not queued_s or not worker.decode_batch:
            return queued_s
        step_s = step_with_s(model, worker, 0, 0)
        return queued_s / max(prefill_share(step_s, self._slo.itl_s), _LEAST_TIME_SHARE)

    def _step_excess(self, situation: AdmissionSituation) -> float:
        """The step of the decode batch with the round in it, as a multiple of the longest one that is taken."""
        worker, model, prompt_tokens = situation.decode, self._model, situation.prompt_tokens
        if not worker.decode_batch:
            return 0.0
        alone_s = model.decode_step_s(1, prompt_tokens, worker.parallelism)
        return step_with_s(model, worker, prompt_tokens) / max(self._slo.itl_s, _SLOW_STEPS * alone_s)

    def _refused(self, reason: RefusalReason, message: str, retry_after_s: float) -> Refusal:
        spread_s = retry_after_s * (1.0 + _JITTER * self._rng.random())
        return Refusal(reason, message, min(max(spread_s, 1.0), _LONGEST_RETRY_S))


def _of(situation: AdmissionSituation) -> str:
    return "of a session in progress" if situation.is_running else "of a new session"
