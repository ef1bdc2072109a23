"""One worker in the local copy: its last publication, and what was reported since, kept up to date report by report."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import mean_rest_s, queue_times
from ampd.state.overlay import QUEUE_GRACE_S, REST_GRACE_S, merge
from ampd.types import PrefillTask, QueueRest, WorkerView

_PROOF_SHARE = 0.5
"""Share of a lease after which a publication proves that the state is reachable for workers. It is longer
than `heartbeat_s`, so that all have fallen silent by then if their publications stop at the same time."""


class KnownWorker:
    """A worker as this process knows it.

    Args:
        model: predicts the times of the queue; None: nothing is predicted.

    Attributes:
        published: the view that the worker published last, with its later reports of the decode batch.
        deadline_s: the end of its lease.
        proof_s: a publication of its role at this time or later proves that its own would have arrived.
        suspect_until_s: it is left out until then.
    """

    __slots__ = (
        "_done",
        "_entered",
        "_held_tokens",
        "_model",
        "_view",
        "_worked_s",
        "deadline_s",
        "proof_s",
        "published",
        "suspect_until_s",
    )

    def __init__(self, view: WorkerView, model: PerformanceModel | None) -> None:
        self.deadline_s = self.proof_s = self.suspect_until_s = self._worked_s = float("-inf")
        self.published = view
        self._model = model
        self._entered: dict[str, tuple[float, PrefillTask]] = {}
        self._done: dict[str, float] = {}
        self._held_tokens = view.held_tokens
        self._view: WorkerView | None = None
        self._predict()

    def renew(self, now_s: float, lease_s: float) -> None:
        """Its lease begins again."""
        self.deadline_s = now_s + lease_s
        self.proof_s = now_s + _PROOF_SHARE * lease_s

    def publish(self, view: WorkerView, now_s: float) -> int:
        """The worker has published. Returns how many entered prefills it never listed, so that they count as lost."""
        lost_tasks = 0
        # A task that the worker lists is gone when the worker no longer lists it.
        for task in view.queue:
            self._entered.pop(task.task_id, None)
        # A task that it does not list was entered after this view was written, unless it was entered too long ago.
        has_rest = view.queue_rest.tasks > 0
        for task_id, (at_s, _) in list(self._entered.items()):
            if now_s - at_s > (REST_GRACE_S if has_rest else QUEUE_GRACE_S):
                del self._entered[task_id]
                lost_tasks += not has_rest
        for task_id, at_s in list(self._done.items()):
            if now_s - at_s > QUEUE_GRACE_S:
                del self._done[task_id]
        self.published = view
        self._held_tokens = view.held_tokens
        self._worked_s = float("-inf")
        self._view = None
        self._predict()
        return lost_tasks

    def _predict(self) -> None:
        """Predict the times of a queue that has just come. Otherwise the next decision would do it for all workers."""
        if self._model is not None:
            with suppress(UserError):  # a decision that needs the times that are missing ends with the same error
                queue_times(self.view(), self._model)

    def enter(self, task: PrefillTask, now_s: float) -> None:
        """A coordinator has entered a prefill. A slow write that lands after the prefill is done changes nothing."""
        if task.task_id in self._entered or task.task_id in self._done:
            return
        self._entered[task.task_id] = (now_s, task)
        self._view = None

    def finish(self, task_id: str, now_s: float) -> None:
        """A prefill is done. A view that was written before does not bring it back."""
        self._entered.pop(task_id, None)
        self._done[task_id] = now_s
        self._view = None

    def end(self, task_id: str, now_s: float) -> None:
        """A prefill is done while the worker does not publish. If it was the one that ran, the next one begins now."""
        running = next(iter([*self._listed(), *self.view().queue]), None)
        if running and task_id == running.task_id:
            self._worked_s = max(self._worked_s, now_s)
        self._drop(task_id)

    def _listed(self) -> list[PrefillTask]:
        """The prefills that are here by the worker's own report only."""
        return [task for task in self.view().queue if task.task_id not in self._entered]

    def _drop(self, task_id: str) -> None:
        self._entered.pop(task_id, None)
        self.published = merge(self.published, (), {task_id})
        self._view = None

    def work_off(self, since_s: float, now_s: float) -> float:
        """Take away the prefills that the model predicts to be done by now, because nothing was heard since `since_s`.

        They run one after the other: those that the worker listed, those that it only counted, and those that were
        entered afterwards, none of which begins before it was entered.

        Returns when the next one will be done; infinite if there is none, or without a model.
        """
        if self._model is None:
            return float("inf")
        self._worked_s = max(self._worked_s, since_s)
        try:
            next_s = self._work_off_those(self._model, self._listed(), now_s)
            if next_s is None:
                next_s = self._work_off_rest(self._model, now_s)
            if next_s is None:
                next_s = self._work_off_those(self._model, self.view().queue, now_s)
        except UserError:  # the model lacks the parallelism: a decision that needs its times ends with the same error
            next_s = None
        return float("inf") if next_s is None else next_s

    def _work_off_those(self, model: PerformanceModel, tasks: Iterable[PrefillTask], now_s: float) -> float | None:
        """When the first of them that is not done will be; None: all are done."""
        for task in tasks:
            entered_s, _ = self._entered.get(task.task_id, (float("-inf"), task))
            takes_s = model.prefill_s(task.hist_tokens, task.incr_tokens, self.published.parallelism)
            done_s = max(self._worked_s, entered_s) + takes_s
            if done_s > now_s:
                return done_s
            self._worked_s = done_s
            self._drop(task.task_id)
        return None

    def _work_off_rest(self, model: PerformanceModel, now_s: float) -> float | None:
        """The same for the prefills that the view only counts: all at once, at the time of the last of them."""
        rest = self.published.queue_rest
        if not rest.tasks:
            return None
        done_s = self._worked_s + rest.tasks * mean_rest_s(rest, model, self.published.parallelism)
        if done_s > now_s:
            return done_s
        self._worked_s = done_s
        self.published = replace(self.published, queue_rest=QueueRest())
        self._view = None
        return None

    def hold(self, session_id: str, tokens: int) -> None:
        """The worker holds the KV of this many tokens of a session."""
        held_tokens = {**self._held_tokens, session_id: tokens}
        if tokens <= 0:
            del held_tokens[session_id]
        self._held_tokens = held_tokens
        self._view = None

    def decode(self, rounds: int, context_tokens: int) -> None:
        """The worker has reported its decode batch."""
        self.published = replace(self.published, decode_batch=rounds, decode_context_tokens=context_tokens)
        self._view = None

    def view(self) -> WorkerView:
        """The worker with all reports."""
        if self._view is None:
            whole = merge(self.published, [task for _, task in self._entered.values()], self._done)
            self._view = replace(whole, held_tokens=self._held_tokens)
        return self._view
