"""Ports and targets of a local graph's metrics."""

import json
import random
import socket
from pathlib import Path

import pytest

from ampd.cli.serve import metrics
from ampd.cli.serve.metrics import free_ports, live_urls, write_targets
from ampd.cli.serve.processes import ProcessSpec
from ampd.errors import RunError


def test_ports_are_free_distinct_and_such_that_dynamo_can_open_them() -> None:
    ports = free_ports("127.0.0.1", 40)
    assert len(set(ports)) == 40
    assert all(1024 < port <= 32767 for port in ports), "Dynamo reads the port as a signed 16-bit number"
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports("127.0.0.1", 1)
    (free,) = free_ports("127.0.0.1", 1)
    draws = iter([taken, free])
    monkeypatch.setattr(random, "randint", lambda _low, _high: next(draws))
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports("127.0.0.1", 1) == (free,)


def test_without_a_free_port_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports("127.0.0.1", 1)
    monkeypatch.setattr(metrics, "_LOWEST_PORT", taken)
    monkeypatch.setattr(metrics, "HIGHEST_PORT", taken)
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(RunError, match="--no-metrics"):
        free_ports("127.0.0.1", 1)


def test_targets_are_a_file_of_prometheus(tmp_path: Path) -> None:
    specs = [ProcessSpec("decode-0", (), {"DYN_SYSTEM_PORT": "20001"}), ProcessSpec("frontend", (), {})]
    path = write_targets(tmp_path, "127.0.0.1", specs, {"frontend": ("0.0.0.0", 8000)})
    assert json.loads(path.read_text()) == [
        {"targets": ["127.0.0.1:20001"], "labels": {"process": "decode-0"}},
        {"targets": ["127.0.0.1:8000"], "labels": {"process": "frontend"}},
    ]


def test_each_process_with_a_port_says_there_whether_it_lives() -> None:
    specs = [
        ProcessSpec("decode-0", (), {"DYN_SYSTEM_PORT": "20001"}),
        ProcessSpec("decode-1", (), {"DYN_SYSTEM_PORT": "-1"}),
        ProcessSpec("frontend", (), {"DYN_SYSTEM_PORT": "-1"}),
    ]
    assert live_urls("0.0.0.0", specs, {"frontend": ("::1", 8000)}) == {
        "decode-0": "http://127.0.0.1:20001/engine/live",
        "frontend": "http://[::1]:8000/live",
    }
