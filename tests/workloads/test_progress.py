"""The bar while a large file is read."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from workloads import trace
from workloads.trace import numbered_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("large_bytes", "out", "shows"), [(1, Terminal, True), (1, io.StringIO, False)])
def test_a_large_file_shows_its_progress_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_bytes: int, out: type[io.StringIO], shows: bool
) -> None:
    monkeypatch.setattr(trace, "LARGE_BYTES", large_bytes)
    monkeypatch.setattr(sys, "stderr", out())
    (tmp_path / "t.jsonl").write_text("{}\n" * 3)
    assert len(list(numbered_lines(tmp_path / "t.jsonl"))) == 3
    assert ("reading t.jsonl" in sys.stderr.getvalue()) is shows


def test_a_small_file_shows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    (tmp_path / "t.jsonl").write_text("{}\n")
    list(numbered_lines(tmp_path / "t.jsonl"))
    assert sys.stderr.getvalue() == ""
