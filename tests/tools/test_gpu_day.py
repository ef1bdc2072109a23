"""The rehearsal of a GPU day: all stages run on a CPU, whatever happens to the one before."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tools.gpu_day import __main__ as day
from tools.gpu_day.pack import CONSTRAINTS, PACKAGES, pinned


def rows(folder: Path, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{stage}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_all_stages_run_without_a_gpu(tmp_path: Path) -> None:
    assert day.main(["--device", "cpu", "--commit", "c1", "--out", str(tmp_path)]) == 0
    found = {stage: rows(tmp_path, stage) for stage in day.STAGES}
    for stage, of_stage in found.items():
        assert of_stage[-1]["what"] == "end", stage
        assert of_stage[-1]["error"] == "", stage
        assert all((row["stage"], row["commit"], row["device"]) == (stage, "c1", "cpu") for row in of_stage)
        assert all(row["versions"]["torch"] and row["card"] for row in of_stage[:-1])
    assert [(row["is_fenced"], row["wrong"], row["failed"], row["late"]) for row in found["fence"][:-1]] == [
        (True, 0, 0, 0),
        (False, 0, 0, 0),
    ]
    assert [row["is_right"] for row in found["pinning"] if row["what"] == "load"] == [True, True]
    assert found["tests"][0]["code"] == 0
    assert {row["what"] for row in found["copies"]} == {"link", "load", "write", "beside", "end"}
    loads = [row for row in found["copies"] if row["what"] == "load"]
    assert {row["order"] for row in loads} == {"neighbours", "any"}
    assert all(0 < row["calls"] < 100 and row["enqueue_ms"] <= row["first_layer_ms"] for row in loads)


def run(stage: str, script: str, tmp_path: Path, limit_s: float = 60.0) -> list[dict[str, Any]]:
    argv = [sys.executable, "-c", script]
    day.run_stage(stage, argv, limit_s, {"device": "cpu", "commit": "c1"}, tmp_path / f"{stage}.jsonl")
    return rows(tmp_path, stage)


def test_a_stage_that_fails_keeps_its_rows(tmp_path: Path) -> None:
    script = """print('{"what": "first"}'); print("a line"); print('{"what"'); raise SystemExit(3)"""
    first, end = run("fence", 'import sys; print(\'{"what": "first"}\', flush=True); sys.exit(3)', tmp_path)
    assert (first["what"], end["what"], end["error"]) == ("first", "end", "it failed with code 3")
    *_, end = run("tests", script, tmp_path)
    assert end["error"]


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "copies.jsonl"
    monkeypatch.setattr(day, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0 * kept.exists()))
    child = tmp_path / "child"
    sleeper = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {sleeper!r}])
while not os.path.exists({str(child)!r}) or not open({str(child)!r}).read():
    time.sleep(0.01)
print('{{"what": "first"}}', flush=True)
time.sleep(600)
"""
    first, end = run("copies", script, tmp_path, 900.0)
    assert (first["what"], end["error"]) == ("first", "it was ended after 900 s")
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_stage_with_rows_of_the_commit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(day, "run_stage", lambda stage, *_: ran.append(stage))
    (tmp_path / "fence.jsonl").write_text('{"commit": "c1", "device": "cpu"}\n{"commit": "c2", "device": "cuda"}\n')
    for commit in ("c1", "c2"):
        assert day.main(["--device", "cpu", "--commit", commit, "--stages", "fence", "--out", str(tmp_path)]) == 0
    assert ran == ["fence"]
    assert day.main(["--device", "cpu", "--commit", "c3", "--limit-s", "1", "--out", str(tmp_path)]) == len(day.STAGES)
    assert ran == ["fence"]


def test_what_travels_has_the_versions_of_the_constraints() -> None:
    text = "msgspec==0.21.0 \\\n    --hash=sha256:0\npydantic-core==2.1 ; python_version < '4'\n"
    assert pinned(["msgspec", "pydantic-core", "pytest"], text) == ["msgspec==0.21.0", "pydantic-core==2.1", "pytest"]
    assert all("==" in name for name in pinned(PACKAGES, CONSTRAINTS.read_text()))
