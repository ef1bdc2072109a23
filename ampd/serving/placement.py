"""Where a round goes: the decode worker of its session, and the worker that prefills it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Sequence

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.base import BindingPolicy, BindingSituation, RoutingPolicy, RoutingSituation
from ampd.policies.estimates import local
from ampd.types import Parallelism, PrefillTask, RouteDecision, Slo, WorkerView

PREFILL_WORKER_REFUSED = "prefill-worker-refused"
"""Reason of a local route: the prefill worker cannot take the prompt, so the decode worker computes it."""


class PlacementPolicies:
    """The policies that place a round, and what they may choose from."""

    def __init__(
        self, binding: BindingPolicy, routing: RoutingPolicy, model: PerformanceModel, rng: random.Random
    ) -> None:
        self._binding = binding
        self._routing = routing
        self._model = model
        self._rng = rng

    def can_predict(self, parallelism: Parallelism) -> bool:
        """Whether the performance model has times for workers with this parallelism."""
        try:
            self._model.prefill_s(0, 1, parallelism)
            self._model.decode_step_s(1, 1, parallelism)
        except UserError:
            return False
        return True

    def bind(self, task: PrefillTask, workers: Sequence[WorkerView], now_s: float) -> str:
        """The id of the decode worker for a new session.

        Args:
            workers: the decode workers whose context has room for the round; not empty.

        Raises:
            UserError: the performance model lacks a worker's parallelism, or the policy named another worker.
        """
        chosen = self._binding.bind(
            BindingSituation(model=self._model, now_s=now_s, task=task, decode=workers, rng=self._rng)
        )
        if all(view.worker_id != chosen for view in workers):
            raise UserError(f"the binding policy chose {chosen!r}, which is not among the decode workers it was given")
        return chosen

    def route(
        self,
        task: PrefillTask,
        decode: WorkerView,
        prefill: Sequence[WorkerView],
        now_s: float,
        *,
        lost: Collection[str] = (),
        local_only: str | None = None,
    ) -> RouteDecision:
        """The route of a round.

        Args:
            prefill: the live prefill workers.
            lost: workers that failed this round before. They are left out.
            local_only: why the prefill must be local, if it must.

        Raises:
            UserError: the performance model lacks a worker's parallelism.
        """
        if local_only is not None:
            return local(decode, local_only)
        # A worker may have become a prefill worker with sessions still bound to it. Its own rounds are local there.
        others = [view for view in prefill if view.worker_id != decode.worker_id and view.worker_id not in lost]
        return self._routing.route(
            RoutingSituation(model=self._model, now_s=now_s, task=task, decode=decode, prefill=others, rng=self._rng)
        )


def prefill_task(
    task_id: str,
    session_id: str,
    prompt_tokens: int,
    held_tokens: int,
    *,
    arrival_s: float,
    slo: Slo,
    session_missed: bool = False,
) -> PrefillTask:
    """The prefill of a round whose decode worker holds the KV of the prompt's first `held_tokens`.

    At least one token is always computed, because its logits give the first output token.
    """
    hist_tokens = min(held_tokens, prompt_tokens - 1)
    incr_tokens = prompt_tokens - hist_tokens
    return PrefillTask(task_id, session_id, hist_tokens, incr_tokens, arrival_s, slo, session_missed=session_missed)


def fits(tokens: int, limit_tokens: int) -> bool:
    """Whether a context of `tokens`, prompt and output together, fits into a limit; a limit of 0 is none."""
    return limit_tokens <= 0 or tokens <= limit_tokens


def exceeded_limit(tokens: int, limits_tokens: Iterable[int]) -> int | None:
    """The largest limit, if the context fits into none; None: it fits somewhere."""
    largest_tokens = 0
    for limit_tokens in limits_tokens:
        if fits(tokens, limit_tokens):
            return None
        largest_tokens = max(largest_tokens, limit_tokens)
    return largest_tokens


def deterministic_choice(session_id: str, workers: Sequence[WorkerView]) -> WorkerView:
    """The worker that every replica with the same view chooses for a session (highest random weight)."""

    def weight(worker: WorkerView) -> bytes:
        text = f"{worker.worker_id}/{session_id}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=8).digest()

    return max(workers, key=weight)
