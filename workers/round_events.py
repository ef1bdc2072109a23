"""The one observer of rounds on a worker: it passes each event to log, metrics, latency windows and publisher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ampd.types import PrefillTask
from ampd.wire import KvReply, KvRequest
from workers.kv.exchange import KvFetch
from workers.pending_changes import PendingChanges
from workers.round_log import StepLog
from workers.round_progress import RoundProgress
from workers.worker_recorder import WorkerRecorder
from workers.worker_view import WorkerWindows


class RoundEvents:
    """Observes rounds. No method waits."""

    def __init__(
        self,
        steps: StepLog,
        recorder: WorkerRecorder,
        windows: WorkerWindows,
        changes: PendingChanges,
        clock: Callable[[], float],
    ) -> None:
        self._steps = steps
        self._recorder = recorder
        self._windows = windows
        self._changes = changes
        self._clock = clock

    def queued(self, task: PrefillTask, source: str | None, queue_length: int) -> None:
        """A prefill is about to enter the queue, in which there are `queue_length` others."""
        self._steps.queued(task, source, queue_length, self._clock())

    def picked(self, task: PrefillTask) -> None:
        """The ordering policy has chosen a prefill."""
        self._steps.picked(task, self._clock())

    def kv_read(self, source: str, part: str, fetched: KvFetch) -> None:
        """A read of KV from another worker has ended. `part`: history or increment."""
        self._steps.read(source, part, fetched)
        self._recorder.read(part, fetched)

    def found(self, progress: RoundProgress, hit_tokens: Mapping[str, int]) -> None:
        """It is known where the KV of a round's prompt was."""
        self._recorder.found(hit_tokens, progress.reload_s)
        self._windows.kv.add(hit_tokens, progress.reload_s)

    def first_token(self, progress: RoundProgress) -> None:
        """The prefill has ended with its first token."""
        now_s, task = self._clock(), progress.task
        progress.prefill_s = now_s - progress.started_s
        self._steps.prefilled(task, progress.prefill_s)
        self._recorder.prefilled(progress.queued_s, progress.prefill_s)
        self._windows.ttft.add(now_s - task.arrival_s, now_s)
        self._changes.changed()

    def left_queue(self, progress: RoundProgress) -> None:
        """The prefill is done or given up. Coordinators count it as waiting work until they hear this.

        It does not wait for the round's end: a prefill that no published queue has listed would count all that time.
        """
        if not progress.has_left_queue:
            progress.has_left_queue = True
            self._changes.finished(progress.task.task_id)

    def tokens(self, progress: RoundProgress, index: int, count: int) -> None:
        """New tokens of one choice have come out."""
        now_s = self._clock()
        if progress.begins_to_decode():
            # A round that was prefilled here has reported the change with its first token.
            self._changes.changed()
        gap_s = progress.gap_s(index, count, now_s)
        if gap_s is not None:
            self._windows.itl.add(gap_s, now_s, count)
            self._recorder.gap(gap_s, count)
            self._changes.sampled()

    def decoded(self, last_chunk: dict[str, Any], progress: RoundProgress) -> None:
        """The engine has ended the round with this chunk."""
        self._steps.decoded(last_chunk, self._clock() - progress.started_s)

    def ended(self, progress: RoundProgress, *, was_queued: bool) -> None:
        """The round has left this worker, however it ended. `was_queued`: its prefill was sent to the queue here."""
        if was_queued:
            self.left_queue(progress)
        self._changes.changed()

    def kv_served(self, request: KvRequest, reply: KvReply) -> None:
        """A call about KV that is held here was answered."""
        self._steps.served(request, reply)
