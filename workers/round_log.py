"""The log lines of a round's steps on a worker: queue, reads of KV, prefill and decode."""

from __future__ import annotations

import logging
from typing import Any

from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog, log_fields
from ampd.types import PrefillTask
from ampd.wire import KvReply, KvRequest
from workers.kv.exchange import KvFetch

log = logging.getLogger(__name__)


class StepLog:
    """Writes the log lines of one worker. The ids come from the round that is being served.

    Args:
        worker_id: of this worker.
        wanted: whether the steps of rounds are logged, or only what went wrong.
    """

    def __init__(self, worker_id: str, wanted: RoundLog = RoundLog.END) -> None:
        self._worker_id = worker_id
        self._level = wanted.step_level

    def queued(self, task: PrefillTask, source: str | None, queue_length: int, now_s: float) -> None:
        """A prefill has entered the queue, in which there are `queue_length` others."""
        self._log(
            "prefill queued",
            task_id=task.task_id,
            hist_tokens=task.hist_tokens,
            incr_tokens=task.incr_tokens,
            waited_s=now_s - task.arrival_s,
            ttft_target_s=task.slo.ttft_s,
            queue_length=queue_length,
            kv_source=source,
        )

    def picked(self, task: PrefillTask, now_s: float) -> None:
        """The ordering policy has chosen it; `waited_s` counts from the round's arrival at the coordinator."""
        waited_s = now_s - task.arrival_s
        self._log("prefill picked", task_id=task.task_id, waited_s=waited_s)

    def read(self, source: str, part: str, fetched: KvFetch) -> None:
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

    def prefilled(self, task: PrefillTask, prefill_s: float) -> None:
        """The first token has come out."""
        self._log("prefill done", task_id=task.task_id, prefill_s=prefill_s)

    def decoded(self, last: dict[str, Any], engine_s: float) -> None:
        """The engine has ended the round, with this chunk; `engine_s`: since it got the round, a prefill included."""
        tokens = last["completion_usage"]["completion_tokens"]
        self._log("decode done", output_tokens=tokens, finish_reason=last["finish_reason"], engine_s=engine_s)

    def served(self, request: KvRequest, reply: KvReply) -> None:
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
