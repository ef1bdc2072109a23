"""Where a round goes: the decode worker of its session, and the worker that prefills it."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.base import BindingPolicy, BindingSituation, RoutingPolicy, RoutingSituation
from ampd.policies.estimates import HasContextLimit, has_room, is_within, local
from ampd.serving.local_only import NO_PERFORMANCE_MODEL, PREFILL_WORKER_REFUSED
from ampd.serving.moves import Move, MoveSituation, due_move, may_move
from ampd.serving.shared_prefixes import reads_history, with_shared
from ampd.types import Moves, Parallelism, PrefillTask, RouteDecision, Slo, WorkerView, usable_tokens

T = TypeVar("T")
_NONE: Mapping[str, int] = {}


WorkerT = TypeVar("WorkerT", bound=HasContextLimit)


class ContextTooLongError(Exception):
    """A round fits no worker. `limit_tokens`: the longest context that a worker takes."""

    def __init__(self, limit_tokens: int) -> None:
        super().__init__(f"the longest context of a worker is {limit_tokens} tokens")
        self.limit_tokens = limit_tokens


@dataclass(slots=True)
class Moving:
    """How a session may move before a round.

    Attributes:
        moves: which sessions may move.
        owners: returns the live workers that own sessions.
        context_tokens: for which a new owner must have room, as in `with_room`.
        moved_s: when the session moved last; minus infinity: never.
    """

    moves: Moves
    owners: Callable[[], Sequence[WorkerView]]
    context_tokens: int
    moved_s: float = -math.inf


@dataclass(slots=True, kw_only=True)
class PlanSituation:
    """A round of a bound session has to be planned.

    Attributes:
        task: its prefill. The history is what the owner has of the session, or the owner before.
        decode: the owner of the session.
        prefill: the live workers that take prefills.
        shared_tokens: returns what workers hold of the prompt for other sessions (`ampd.serving.shared_prefixes`).
        lost: workers that failed this round before.
        local_only: why the prefill must be local, if it must.
        holder: the worker that holds the history, if the session has just moved away from it.
        moving: None: the session stays.
    """

    task: PrefillTask
    decode: WorkerView
    prefill: Sequence[WorkerView]
    now_s: float
    shared_tokens: Callable[[Sequence[WorkerView]], Mapping[str, int]]
    lost: Collection[str] = ()
    local_only: str | None = None
    holder: WorkerView | None = None
    moving: Moving | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a round goes.

    Attributes:
        decode: the owner of the session, or the new owner.
        task: its history is what the worker that prefills need not compute, as far as is known.
        holder: the worker that holds the history, if the session moves away from it; None: `decode` does.
        move_reason: why the session moves; "": it does not.
        shared_tokens: of the prompt that the worker that prefills holds for other sessions.
    """

    decode: WorkerView
    decision: RouteDecision
    task: PrefillTask
    holder: WorkerView | None = None
    move_reason: str = ""
    shared_tokens: int = 0

    @property
    def source(self) -> WorkerView | None:
        """The worker that the prefill reads its history from; None: it is there already, or there is none."""
        holder = self.holder or self.decode
        if holder.worker_id == self.decision.worker_id or not reads_history(self.task, self.shared_tokens):
            return None
        return holder

    def with_shared(self, shared_tokens: Mapping[str, int]) -> Plan:
        """The plan when the worker of the prefill holds these tokens of the prompt for other sessions, by worker."""
        tokens = shared_tokens.get(self.decision.worker_id, 0)
        return replace(self, task=with_shared(self.task, tokens), shared_tokens=tokens) if tokens else self


class PlacementPolicies:
    """The policies that place a round, and what they may choose from. Live and simulated coordinators ask it.

    Args:
        left_out: called with the error if the performance model lacks the parallelism of a worker. Such workers are
            then left out, so that the round is served. None: the error is raised.
    """

    def __init__(
        self,
        binding: BindingPolicy,
        routing: RoutingPolicy,
        model: PerformanceModel,
        rng: random.Random,
        left_out: Callable[[UserError], None] | None = None,
    ) -> None:
        self._binding = binding
        self._routing = routing
        self._model = model
        self._rng = rng
        self._left_out = left_out

    def bind(
        self, task: PrefillTask, workers: Sequence[WorkerView], now_s: float, shared_tokens: Mapping[str, int] = _NONE
    ) -> str:
        """The id of the decode worker for a new session.

        Args:
            workers: the workers that own sessions and have room for the round; not empty.
            shared_tokens: what workers hold of the prompt for other sessions (`ampd.serving.shared_prefixes`).

        Raises:
            UserError: without `left_out`. The performance model lacks a worker's parallelism, or the policy named
                another worker.
        """

        def bind(views: Sequence[WorkerView]) -> str | None:
            return self._bind(task, views, now_s, shared_tokens) if views else None

        return self._choice(bind, workers) or deterministic_choice(task.session_id, workers).worker_id

    def route(
        self,
        task: PrefillTask,
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        now_s: float,
        *,
        lost: Collection[str] = (),
        local_only: str | None = None,
        holder: WorkerView | None = None,
        shared_tokens: Mapping[str, int] = _NONE,
        offers: dict[str, Any] | None = None,
    ) -> RouteDecision:
        """The route of a round. It is local if the prompt does not fit at the worker that the policy chose.

        Args:
            task: its history includes what the decode worker holds of the prompt for other sessions.
            prefill: the live workers that take prefills.
            lost: workers that failed this round before. They are left out.
            local_only: why the prefill must be local, if it must.
            holder: the worker that holds the history, if the session has just moved away from it.
            shared_tokens: what workers hold of the prompt for other sessions.
            offers: what the policy has predicted for the round with the same holder; it adds to it.

        Raises:
            UserError: without `left_out`. The performance model lacks a worker's parallelism.
        """
        if local_only is not None:
            return local(decode, local_only)
        # A mixed worker owns sessions, and so does a prefill worker that was a decode worker before. Their own rounds
        # are local there.
        own_id = decode.worker_id
        others = [view for view in readable(decode, prefill) if view.worker_id != own_id and view.worker_id not in lost]

        def route(views: Sequence[WorkerView]) -> RouteDecision:
            return self._routing.route(
                RoutingSituation(
                    model=self._model,
                    now_s=now_s,
                    task=task,
                    decode=decode,
                    prefill=views,
                    rng=self._rng,
                    holder=holder,
                    shared_tokens=shared_tokens,
                    offers=offers,
                )
            )

        decision = self._choice(route, others) or local(decode, NO_PERFORMANCE_MODEL)
        if decision.worker_id == own_id or _takes(task, decision.worker_id, others):
            return decision
        return local(decode, PREFILL_WORKER_REFUSED)

    def plan(self, situation: PlanSituation) -> Plan:
        """Where a round of a bound session is prefilled, and whether its session moves before it.

        What a worker holds of the prompt for other sessions counts as history: first what the owner holds, and then
        what the worker of the prefill holds.

        Raises:
            UserError: without `left_out`. The performance model lacks the parallelism of a worker.
        """
        decode, prefill, moving = situation.decode, situation.prefill, situation.moving
        shared = situation.shared_tokens([decode, *prefill])
        task = with_shared(situation.task, shared.get(decode.worker_id, 0))
        if moving is not None and not may_move(moving.moves, decode, task.incr_tokens):
            moving = None
        # Most sessions may not move. Then the offers are used once, and keeping them would only cost time.
        offers: dict[str, Any] | None = None if moving is None else {}
        decision = self.route(
            task,
            decode,
            prefill,
            situation.now_s,
            lost=situation.lost,
            local_only=situation.local_only,
            holder=situation.holder,
            shared_tokens=shared,
            offers=offers,
        )
        if situation.holder is not None and situation.holder.worker_id != decode.worker_id:
            offers = {}  # a new owner would have the history read from this one
        move = None if moving is None else self._move(situation, moving, task, decision, offers)
        if move is None:
            return Plan(decode, decision, task, situation.holder).with_shared(shared)
        shared = situation.shared_tokens([move.owner, *prefill])
        return Plan(move.owner, move.decision, task, decode, move.reason).with_shared(shared)

    def _move(
        self,
        situation: PlanSituation,
        moving: Moving,
        task: PrefillTask,
        stay: RouteDecision,
        offers: dict[str, Any] | None,
    ) -> Move | None:
        """The move of a session to another owner that pays; None: it stays.

        Args:
            offers: what the policy has predicted for the prefill workers. That is the same under every owner.
        """
        decode, prefill = situation.decode, situation.prefill
        owners = moving.owners()
        shared_tokens = situation.shared_tokens([*owners, *prefill])

        def route(owner: WorkerView) -> RouteDecision:
            return self.route(
                task,
                owner,
                prefill,
                situation.now_s,
                local_only=situation.local_only,
                holder=decode,
                shared_tokens=shared_tokens,
                offers=offers,
            )

        others = [
            view
            for view in readable(decode, owners)
            if view.worker_id != decode.worker_id and has_room(moving.context_tokens, view)
        ]
        try:
            return due_move(
                MoveSituation(
                    model=self._model,
                    now_s=situation.now_s,
                    task=task,
                    owner=decode,
                    stay=stay,
                    others=others,
                    moved_s=moving.moved_s,
                    route=route,
                    shared_tokens=shared_tokens,
                    moves=moving.moves,
                )
            )
        except UserError as error:
            if self._left_out is None:
                raise
            self._left_out(error)
            return None

    def _bind(
        self, task: PrefillTask, workers: Sequence[WorkerView], now_s: float, shared_tokens: Mapping[str, int]
    ) -> str:
        chosen = self._binding.bind(
            BindingSituation(
                model=self._model, now_s=now_s, task=task, decode=workers, rng=self._rng, shared_tokens=shared_tokens
            )
        )
        if all(view.worker_id != chosen for view in workers):
            raise UserError(f"the binding policy chose {chosen!r}, which is not among the decode workers it was given")
        return chosen

    def _choice(self, policy: Callable[[Sequence[WorkerView]], T], workers: Sequence[WorkerView]) -> T | None:
        """The policy's answer, without the workers that are left out; None: it cannot choose without them either."""
        try:
            return policy(workers)
        except UserError as error:
            if self._left_out is None:
                raise
            self._left_out(error)
        with suppress(UserError):
            return policy([view for view in workers if self._has_times(view.parallelism)])
        return None

    def _has_times(self, parallelism: Parallelism) -> bool:
        try:
            self._model.prefill_s(0, 1, parallelism)
            self._model.decode_step_s(1, 1, parallelism)
        except UserError:
            return False
        return True


def prefill_task(
    task_id: str,
    session_id: str,
    prompt_tokens: int,
    held_tokens: int,
    *,
    arrival_s: float,
    slo: Slo,
    session_missed: bool = False,
    has_output: bool = False,
) -> PrefillTask:
    """The prefill of a round whose decode worker holds the KV of the prompt's first `held_tokens`."""
    hist_tokens = usable_tokens(held_tokens, prompt_tokens)
    incr_tokens = prompt_tokens - hist_tokens
    return PrefillTask(
        task_id,
        session_id,
        hist_tokens,
        incr_tokens,
        arrival_s,
        slo,
        session_missed=session_missed,
        has_output=has_output,
    )


def with_room(context_tokens: int, workers: Sequence[WorkerT]) -> list[WorkerT]:
    """The workers whose longest context takes a round.

    Args:
        context_tokens: the prompt and the output that is sure to come. A coordinator counts one token of output,
            because the model may end after it. The simulator counts all tokens of the recorded output.
        workers: not empty.

    Raises:
        ContextTooLongError: no worker takes it.
    """
    roomy = [worker for worker in workers if has_room(context_tokens, worker)]
    if not roomy:
        raise ContextTooLongError(max(worker.max_context_tokens for worker in workers))
    return roomy


def _takes(task: PrefillTask, worker_id: str, workers: Sequence[WorkerView]) -> bool:
    """Whether a worker has room for the prompt of a prefill and its first token."""
    for worker in workers:
        if worker.worker_id == worker_id:
            return is_within(task.context_tokens + 1, worker.max_context_tokens)
    return True


def readable(decode: WorkerView, prefill: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """The prefill workers whose KV the decode worker can read, by their fingerprints.

    A worker of an older version has no fingerprint. It can read, and be read by, every worker.
    """
    ours = decode.fingerprint
    return [view for view in prefill if view.fingerprint in ("", ours)] if ours else prefill


def deterministic_choice(session_id: str, workers: Sequence[WorkerView]) -> WorkerView:
    """The worker that every replica with the same view chooses for a session (highest random weight)."""

    def weight(worker: WorkerView) -> bytes:
        text = f"{worker.worker_id}/{session_id}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=8).digest()

    return max(workers, key=weight)
