"""One worker in the local copy: its last publication, and what was reported since, kept up to date report by report."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from ampd.errors import UserError
from ampd.perf.model import PerformanceModel
from ampd.policies.estimates import Queue, queue_times
from ampd.types import PrefillTask, QueueRest, WorkerView

PUBLISH_INTERVAL_S = 0.025
"""Shortest time between two publications of a worker's view."""

SAMPLE_INTERVAL_S = 0.25
"""How soon after new samples (TTFT, ITL, growing contexts) a worker publishes its view; other changes are quicker."""

REST_GRACE_S = 0.5
"""How long an entered prefill may be missing from a view that does not list its whole queue. Then it is in the rest."""

QUEUE_GRACE_S = 2.0
"""How long an entered prefill may be missing from its worker's own queue before it counts as lost.

A finished prefill is removed for as long from views that were written before it finished."""


def heartbeat_s(lease_s: float) -> float:
    """Longest time between two publications of a process, so that two of them may fail before its lease ends."""
    return lease_s / 3


def merge(view: WorkerView, entered: Iterable[PrefillTask], done: Collection[str]) -> WorkerView:
    """The view with `entered` tasks appended, and `done` task ids removed."""
    stays = [task for task in view.queue if task.task_id not in done]
    known = {task.task_id for task in stays}
    more = [task for task in entered if task.task_id not in known and task.task_id not in done]
    if not more and len(stays) == len(view.queue):
        return view
    return replace(view, queue=Queue([*stays, *more]))


# -- One worker in the local copy: its last publication, and what was reported since, kept up to date report by report

_PROOF_SHARE = 0.5
"""Share of a lease after which a publication proves that the state is reachable for workers. It is longer
than `heartbeat_s`, so that all have fallen silent by then if their publications stop at the same time."""


class KnownWorker:
    """A worker as this process knows it.

    Args:
        model: predicts the times of the queue; None: nothing is predicted.

    Attributes:
        published: the view that the worker published last, with its later reports.
        deadline_s: the end of its lease.
        proof_s: a publication of its role at this time or later proves that its own would have arrived.
        suspect_until_s: it is left out until then.
        fits: whether it can serve the reader's rounds, by its last publication.
    """

    __slots__ = (
        "_done",
        "_entered",
        "_model",
        "_view",
        "deadline_s",
        "fits",
        "proof_s",
        "published",
        "suspect_until_s",
    )

    def __init__(self, view: WorkerView, model: PerformanceModel | None) -> None:
        self.deadline_s = self.proof_s = self.suspect_until_s = float("-inf")
        self.published = view
        self.fits = True
        self._model = model
        self._entered: dict[str, tuple[float, PrefillTask]] = {}
        self._done: dict[str, float] = {}
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
        self.published = view
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
        while self._done and now_s - self._done[oldest := next(iter(self._done))] > QUEUE_GRACE_S:
            if any(task.task_id == oldest for task in self.published.queue):
                break  # a worker that has died lists its prefills until its lease is over
            del self._done[oldest]
        self._done[task_id] = now_s
        self._view = None

    def forget_queue(self) -> None:
        """What waited here before the shared state was lost is not known any more."""
        self._entered.clear()
        self._done.clear()
        self.published = replace(self.published, queue=Queue(()), queue_rest=QueueRest())
        self._view = None

    def hold(self, session_id: str, tokens: int, batch: tuple[int, int] | None = None) -> None:
        """The worker holds the KV of this many tokens of a session, and has this decode batch, if it is known."""
        known = self.published
        held_tokens = {**known.held_tokens, session_id: tokens}
        if tokens <= 0:
            del held_tokens[session_id]
        rounds, context_tokens = batch or (known.decode_batch, known.decode_context_tokens)
        self.published = replace(
            known, held_tokens=held_tokens, decode_batch=rounds, decode_context_tokens=context_tokens
        )
        self._view = None

    def view(self) -> WorkerView:
        """The worker with all reports."""
        if self._view is None:
            self._view = merge(self.published, [task for _, task in self._entered.values()], self._done)
        return self._view
