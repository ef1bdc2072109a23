"""What a worker says of a round's steps, and what it says although nobody asked for steps."""

import logging
import time
from typing import Any

import pytest

from ampd.telemetry import tracing
from ampd.telemetry.logs import RoundLog
from ampd.telemetry.tracing import Trace
from workers.kv.exchange import KvFetch
from workers.round_log import RoundEvents
from workers.worker_recorder import WorkerRecorder


def observer(wanted: RoundLog) -> RoundEvents:
    nothing: Any = None
    return RoundEvents("W", wanted, WorkerRecorder(), nothing, nothing, time.monotonic)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, dict[str, object]]]:
    return [(record.levelno, record.getMessage(), getattr(record, "ampd_fields")) for record in caplog.records]  # noqa: B009


@pytest.mark.parametrize("wanted", [RoundLog.NONE, RoundLog.END])
def test_a_failed_read_is_told_in_any_case(caplog: pytest.LogCaptureFixture, wanted: RoundLog) -> None:
    caplog.set_level(logging.INFO, "workers.round_log")
    events = observer(wanted)
    events.kv_read("S", "history", KvFetch(16, 1024, 0.5))
    events.kv_read("S", "history", KvFetch(0, 0, 0.5, "no answer"))
    fields = {"worker_id": "W", "kv_source": "S", "part": "history", "tokens": 0, "bytes": 0, "seconds": 0.5}
    assert said(caplog) == [(logging.WARNING, "KV read failed", {**fields, "error": "no answer"})]


def test_an_answer_about_kv_says_who_asked_and_what_was_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "workers.round_log")
    token = tracing._CURRENT.set(Trace("r", caller="P"))
    try:
        events = observer(RoundLog.STEPS)
        events.kv_served({"op": "lease", "keys": [b"a", b"b"]}, {"matched": 1, "lease_id": "7", "descriptor": b""})
        events.kv_served({"op": "match", "keys": [b"a", b"b"]}, {"matched": 0})
        events.kv_served({"op": "what"}, {"error": "unknown operation 'what'"})
    finally:
        tracing._CURRENT.reset(token)
    asked = {"worker_id": "W", "caller": "P", "asked_pages": 2}
    assert [(message, fields) for _, message, fields in said(caplog)] == [
        ("KV lease", {**asked, "held_pages": 1, "lease_id": "7"}),
        ("KV match", {**asked, "held_pages": 0}),
        ("KV what", {"worker_id": "W", "caller": "P", "error": "unknown operation 'what'"}),
    ]
