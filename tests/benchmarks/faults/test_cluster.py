"""The processes of the matrix's graph."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ampd.cli.serve.graph import FRONTEND_ENVIRONMENT
from benchmarks.faults.cluster import LiveGraph, Member


class Server:
    """Starts nothing, and keeps what it should have started."""

    def __init__(self) -> None:
        self.started: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def start(self, argv: Sequence[str], environment: Mapping[str, str], _log: Path) -> None:
        self.started.append((argv, environment))


def test_frontends_are_those_that_clients_have_with_the_status_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPD_STATE_URL", "redis://:password@host")
    server = Server()
    member = LiveGraph(tmp_path, cast("Any", server), *cast("Any", (None, None))).start("frontend")
    ((argv, environment),) = server.started
    assert argv[2] == "router.status_relay"
    assert argv[argv.index("--http-port") + 1] == str(member.port)
    assert environment.items() >= FRONTEND_ENVIRONMENT.items()
    assert "AMPD_STATE_URL" not in environment


def test_what_a_process_has_started_can_be_struck(tmp_path: Path) -> None:
    # A shell's background job has no input of its own: such a `cat` would end at once.
    script = "exec 3<&0; cat <&3 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        member = Member("frontend-1", "frontend", cast("Any", process), tmp_path, tmp_path, tmp_path)
        try:
            assert member.children() == [child]
        finally:
            os.kill(child, signal.SIGKILL)
