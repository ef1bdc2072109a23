"""Ports and targets of a local graph's metrics."""

import json
from pathlib import Path

from ampd.cli.serve.graph import live_urls, write_targets
from ampd.cli.serve.processes import ProcessSpec


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
