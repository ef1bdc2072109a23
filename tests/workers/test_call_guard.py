"""Which refused calls are logged and counted."""

from typing import Any

import pytest

from ampd.call_signatures import SIGNATURE, Signer, Verifier
from workers.call_guard import CallGuard, CallRefusedError
from workers.worker_recorder import WorkerRecorder

KEYS = (b"k" * 32,)


class Counted(WorkerRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def refused(self, reason: str) -> None:
        super().refused(reason)
        self.reasons.append(reason)


def metadata_of(caller: str, keys: tuple[bytes, ...] = (b"f" * 32,)) -> dict[str, str]:
    metadata: dict[str, str] = {}
    Signer(keys, caller).sign(metadata, "kv", "w1", {})
    return metadata


def refuse(guard: CallGuard, metadata: dict[str, str], message: Any = None) -> None:
    with pytest.raises(CallRefusedError):
        guard.check(metadata, "kv", {} if message is None else message)


def test_each_caller_is_logged_once_per_reason_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Counted()
    guard = CallGuard(Verifier(KEYS, "w1"), recorder)
    guard.check(metadata_of("coordinator-1", KEYS), "kv", {})
    for _ in range(3):
        refuse(guard, {})
        refuse(guard, metadata_of("worker-5"))
    assert recorder.reasons == ["missing", "wrong"] * 3
    unsigned, foreign = caplog.messages
    assert "an unknown process" in unsigned
    assert "worker-5" in foreign
    assert all("--graph-secret-file" in line for line in (unsigned, foreign))


def test_a_stranger_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    guard = CallGuard(Verifier(KEYS, "w1"), WorkerRecorder())
    for number in range(500):
        refuse(guard, metadata_of(f"worker-{number}"))
    assert len(caplog.messages) < 100
    assert "more callers" in caplog.messages[-1]


def test_a_stranger_cannot_write_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    guard = CallGuard(Verifier(KEYS, "w1"), WorkerRecorder())
    signature = metadata_of("worker-1")[SIGNATURE]
    refuse(guard, {SIGNATURE: signature.replace("worker-1", "worker\n2026 ERROR")})
    refuse(guard, {SIGNATURE: signature.replace("worker-1", "worker\x1b[2J")})
    assert all(text.isprintable() for text in caplog.messages)
