"""Small changes of a worker since its last published view, laid over that view.

A worker publishes its whole view about once a second. Between two publications coordinators enter prefills in its queue
and the worker reports finished prefills and changed sessions one by one. Both the stores and the local copy keep these
small changes beside the view, and merge them when the view is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ampd.policies.estimates import Queue
from ampd.types import PrefillTask, WorkerView

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


def merge(
    view: WorkerView, entered: Iterable[PrefillTask], done: Collection[str], held: Mapping[str, int] | None = None
) -> WorkerView:
    """The view with `entered` tasks appended, `done` task ids removed, and the tokens of `held` sessions (0: none)."""
    left = [task for task in view.queue if task.task_id in done] if done else []
    stays = [task for task in view.queue if task.task_id not in done] if left else list(view.queue)
    known = {task.task_id for task in stays}
    more = [task for task in entered if task.task_id not in known and task.task_id not in done]
    queue = view.queue
    if left or more:
        queue = Queue([*stays, *more])
    held_tokens = view.held_tokens
    if held:
        held_tokens = {session_id: tokens for session_id, tokens in {**held_tokens, **held}.items() if tokens > 0}
    return replace(view, queue=queue, held_tokens=held_tokens)
