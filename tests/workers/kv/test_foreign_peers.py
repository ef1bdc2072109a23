"""Workers of another kind of KV: refused each time, logged once, and forgotten when no round names them any more."""

from __future__ import annotations

from contextlib import suppress

import pytest

from workers.kv.foreign_peers import ForeignPeers


def test_a_worker_is_refused_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    peers = ForeignPeers()
    peers.check("w1")
    for refuse in (lambda: peers.refuse("w1", "dtype differs"), lambda: peers.check("w1"), lambda: peers.check("w1")):
        with pytest.raises(ValueError, match="w1 has another kind of KV: dtype differs"):
            refuse()
    (line,) = caplog.messages
    assert "worker w1 has another kind of KV than this worker (dtype differs)" in line


def test_workers_that_are_gone_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    peers = ForeignPeers(most=3)
    for number in range(50):
        with suppress(ValueError):
            peers.refuse(f"w{number}", "dtype differs")
        with suppress(ValueError):
            peers.refuse("stays", "dtype differs")
    assert len(peers) == 3
    assert sum("worker stays has" in message for message in caplog.messages) == 1
    peers.check("w0")
