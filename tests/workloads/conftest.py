"""An endpoint for replays, and `ampd replay` against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ampd.cli.main import main
from tests.workloads.openai_server import Behaviour, serve
from workloads.trace import Session, write_trace


@dataclass
class Replay:
    """Replays sessions against the endpoint of this test, which behaves as `behaviour` says."""

    behaviour: Behaviour
    url: str
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *sessions: Session, flags: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        """The exit code, and the result with what was printed as `stdout`."""
        trace, out = self.folder / "trace.jsonl", self.folder / "result.json"
        write_trace(sessions, trace)
        code = main(["replay", str(trace), "--url", self.url, "--json", str(out), *flags])
        return code, json.loads(out.read_text()) | {"stdout": self.capsys.readouterr().out}


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Replay]:
    behaviour = Behaviour()
    with serve(behaviour) as url:
        yield Replay(behaviour, url, tmp_path, capsys)
