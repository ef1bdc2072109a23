"""`make audit`: what it prints and how it ends, with a program that answers as pip-audit does."""

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.audit import audit


def program(folder: Path, report: Any, error: str, code: int) -> str:
    """Writes `report` where it was told to, and `error` to stderr."""
    path = folder / "pip-audit"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"report = json.loads({json.dumps(json.dumps(report))})\n"
        "if report is not None:\n    open(sys.argv[sys.argv.index('--output') + 1], 'w').write(json.dumps(report))\n"
        f"print({error!r}, file=sys.stderr)\nsys.exit({code})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def package(*advisories: str) -> dict[str, Any]:
    return {"name": "h11", "version": "0.1", "vulns": [{"id": each, "fix_versions": ["0.2"]} for each in advisories]}


def test_an_advisory_is_a_line_and_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"dependencies": [package("PYSEC-1"), package()]}
    assert audit(program(tmp_path, found, "Found 1 known vulnerability", 1), "constraints.txt") == 1
    assert capsys.readouterr().out == "h11 0.1: PYSEC-1; fixed in 0.2\nmake audit: 2 packages, 1 advisories\n"


def test_without_an_advisory_it_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(program(tmp_path, {"dependencies": [package()]}, "", 0), "constraints.txt") == 0
    assert capsys.readouterr().out == "make audit: 1 packages, 0 advisories\n"


def test_a_service_that_cannot_be_reached_is_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = "Traceback ...\nrequests.exceptions.ConnectionError: Max retries exceeded with url: /pypi/h11/0.1/json"
    assert audit(program(tmp_path, None, error, 1), "constraints.txt") == 0
    assert "skipped, because the service with the advisories cannot be reached" in capsys.readouterr().out


def test_another_failure_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(program(tmp_path, None, "error: no such file", 1), "constraints.txt") == 1
    assert capsys.readouterr().err == "make audit: error: no such file\n"


def test_it_is_a_script() -> None:
    """`make` runs the file itself, so it imports nothing of the project."""
    script = Path(__file__).parents[2] / "tools" / "audit.py"
    done = subprocess.run(
        [sys.executable, "-I", script, "/bin/false", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "make audit: no output\n"


def test_the_job_is_the_audit(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    make.chmod(0o755)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [root / ".ci" / "audit"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{root} audit\n"), done.stderr
