"""`ampd compare`: figures beside each other, and reports made again from JSON."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampd.cli.main import main

CASE = ["tau-bench-airline", "--perf", "qwen3-32b-h20", "--limit", "6"]
SIMULATE = ["simulate", *CASE, "--prefill", "1xTP4", "--decode", "1xTP4", "--rate", "2"]


@pytest.fixture
def documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """Files of two simulations and of a plan, with their reports."""
    commands = {
        "single": SIMULATE,
        "modes": [*SIMULATE, "--mode", "disaggregated,colocated"],
        "plan": ["plan", *CASE, "--gpus", "8", "--rate", "0.5", "--degrees", "4", "--budget-s", "0"],
    }
    for name, argv in commands.items():
        assert main([*argv, "--json", "--report", str(tmp_path / f"{name}.html")]) == 0
        (tmp_path / f"{name}.json").write_text(capsys.readouterr().out)
    return {name: tmp_path / f"{name}.json" for name in commands}


@pytest.mark.slow
def test_reports_are_made_again_and_results_are_compared(
    documents: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for path in documents.values():
        again = tmp_path / "again.html"
        assert main(["compare", str(path), "--report", str(again)]) == 0
        assert again.read_text() == path.with_suffix(".html").read_text()
    capsys.readouterr()
    report = tmp_path / "comparison.html"
    assert main(["compare", *map(str, documents.values()), "--report", str(report)]) == 0
    head, first, *_, note = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head.strip()) == ["single", "modes: predictive / on-time", "modes: colocated", "plan"]
    assert first.startswith("rounds within both targets")
    assert note.startswith(f"{documents['single']} is a simulation, ")
    assert f"{documents['plan']} is a plan" in note
    page = report.read_text()
    assert "the change from single" in page
    assert note in page
    assert '"name":"modes: colocated"' in page


@pytest.mark.slow
def test_equal_file_names_are_told_apart(documents: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    other = documents["single"].parent / "other" / "single.json"
    other.parent.mkdir()
    other.write_text(documents["single"].read_text())
    capsys.readouterr()
    assert main(["compare", str(documents["single"]), str(other)]) == 0
    head, *_, last = capsys.readouterr().out.splitlines()
    assert head.split() == [str(documents["single"]), str(other)]
    assert last.startswith("seconds"), "no note"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "is no result of this version"),
        ('{"kind": "other"}', "is no result of this version"),
        ('{"kind": "plan"}', "not of this version of AMPD: KeyError('layouts')"),
        (None, "cannot be read"),
    ],
)
def test_another_file_is_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["compare", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
