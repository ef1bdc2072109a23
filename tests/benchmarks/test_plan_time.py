"""The times of plans: two versions take turns, each with its own sources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import plan_time

STUB = """
import json, sys
open({log!r}, "a").write({name!r} + " ")
print("best after 0.1 s: a layout", file=sys.stderr)
group = [{{"tp": {tp}, "replicas": 1}}]
layout = {{"prefill": [], "decode": group, "gpus": {tp}, "attainment": {{"mean": 0.95}}}}
print(json.dumps({{"layouts": [layout], "stopped": None}}))
"""


def version(folder: Path, name: str, tp: int) -> Path:
    """Sources whose `ampd plan` answers at once, and notes that it ran."""
    for package in ("ampd", "planner"):
        (folder / name / package).mkdir(parents=True)
    text = STUB.format(log=str(folder / "runs"), name=name, tp=tp)
    (folder / name / "ampd" / "__main__.py").write_text(text)
    (folder / name / "ampd" / "__init__.py").write_text("")
    return folder / name


def test_two_versions_take_turns_with_their_own_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = version(tmp_path, "before", 2)
    monkeypatch.setattr(plan_time, "_HERE", version(tmp_path, "now", 1))
    monkeypatch.setattr(sys, "argv", ["plan_time", "--gpus", "8", "--repeats", "2", "--against", str(before)])
    assert plan_time.main() == 0
    assert (tmp_path / "runs").read_text().split() == ["before", "now"] * 2
    ours, theirs = capsys.readouterr().out.splitlines()
    assert "co-located 1xTP1 on 1 GPUs" in ours
    assert "against: first 0.1 s" in theirs
    assert "co-located 1xTP2 on 2 GPUs" in theirs
    assert "ours / theirs: " in theirs


def test_a_folder_without_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_time", "--against", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        plan_time.main()
    assert end.value.code == 2
    assert "has no folder `planner`" in capsys.readouterr().err
