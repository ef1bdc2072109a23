"""The one observer of rounds on a worker: it passes each event to log, metrics, latency windows and publisher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog, log_fields
from ampd.types import PrefillTask
from ampd.wire import KvReply, KvRequest
from workers.kv.exchange import KvFetch
from workers.pending_changes import PendingChanges
from workers.round_progress import RoundProgress
from workers.worker_recorder import WorkerRecorder
from workers.worker_view import WorkerWindows

log = logging.getLogger(__name__)


class RoundEvents:
    """Observes rounds. No method waits.

    Args:
        worker_id: of this worker.
        wanted: whether the steps of rounds are logged, or only what went wrong. The ids in a line come from the round
            that is being served.
    """

    def __init__(
        self,
        worker_id: str,
        wanted: RoundLog,
        recorder: WorkerRecorder,
        windows: WorkerWindows,
        changes: PendingChanges,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._level = wanted.step_level
        self._recorder = recorder
        self._windows = windows
        self._changes = changes
        self._clock = clock

    def queued(self, task: PrefillTask, source: str | None, queue_length: int) -> None:
        """A prefill is about to enter the queue, in which there are `queue_length` others."""
        self._log(
            "prefill queued",
            task_id=task.task_id,
            hist_tokens=task.hist_tokens,
            incr_tokens=task.incr_tokens,
            waited_s=self._clock() - task.arrival_s,
            ttft_target_s=task.slo.ttft_s,
            queue_length=queue_length,
            kv_source=source,
        )

    def picked(self, task: PrefillTask) -> None:
        """The ordering policy has chosen a prefill; `waited_s` counts from the round's arrival at the coordinator."""
        self._log("prefill picked", task_id=task.task_id, waited_s=self._clock() - task.arrival_s)

    def kv_read(self, source: str, part: str, fetched: KvFetch) -> None:
        """A read of KV from another worker has ended; missing KV is computed here. `part`: history or increment."""
        self._log(
            "KV read failed" if fetched.error else "KV read",
            level=logging.WARNING if fetched.error else None,
            kv_source=source,
            part=part,
            tokens=fetched.tokens,
            bytes=fetched.bytes,
            seconds=fetched.seconds,
            error=fetched.error,
        )
        self._recorder.read(part, fetched)

    def found(self, progress: RoundProgress, hit_tokens: Mapping[str, int]) -> None:
        """It is known where the KV of a round's prompt was."""
        self._recorder.found(hit_tokens, progress.reload_s)
        self._windows.kv.add(hit_tokens, progress.reload_s)

    def first_token(self, progress: RoundProgress) -> None:
        """The prefill has ended with its first token."""
        now_s, task = self._clock(), progress.task
        progress.prefill_s = now_s - progress.started_s
        self._log("prefill done", task_id=task.task_id, prefill_s=progress.prefill_s)
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

    def decoded(self, last: dict[str, Any], progress: RoundProgress) -> None:
        """The engine has ended the round with this chunk."""
        self._log(
            "decode done",
            output_tokens=last["completion_usage"]["completion_tokens"],
            finish_reason=last["finish_reason"],
            engine_s=self._clock() - progress.started_s,  # since it got the round, a prefill included
        )

    def ended(self, progress: RoundProgress, *, was_queued: bool) -> None:
        """The round has left this worker, however it ended. `was_queued`: its prefill was sent to the queue here."""
        if was_queued:
            self.left_queue(progress)
        self._changes.changed()

    def kv_served(self, request: KvRequest, reply: KvReply) -> None:
        """A call of another worker or of a coordinator about KV that is held here was answered."""
        trace, keys = tracing.current(), request.get("keys")
        self._log(
            f"KV {request.get('op')}",
            caller=trace.caller if trace else None,
            asked_pages=None if keys is None else len(keys),
            held_pages=reply.get("matched"),
            lease_id=reply.get("lease_id") or request.get("lease_id"),
            released_tokens=reply.get("released_tokens"),
            error=reply.get("error"),
        )

    def _log(self, message: str, level: int | None = None, **fields: Any) -> None:
        log_fields(log, self._level if level is None else level, message, worker_id=self._worker_id, **fields)
