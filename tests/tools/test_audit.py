"""`make audit`: what it prints and how it ends, with a program that answers as pip-audit does."""

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.audit import CANARY, audit


def program(folder: Path, report: Any, error: str = "", *, has_data: bool = True) -> str:
    """Writes `report` where it was told to, or that of the canary, and `error` to stderr."""
    known = {"name": CANARY, "version": "1", "vulns": [{"id": "PYSEC-0", "fix_versions": ["2"]}] if has_data else []}
    path = folder / "pip-audit"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"canary, report = json.loads({json.dumps(json.dumps([{'dependencies': [known]}, report]))})\n"
        "given = open(sys.argv[sys.argv.index('--requirement') + 1]).read()\n"
        f"found = canary if given.startswith('{CANARY}==') else report\n"
        "if report is not None:\n    open(sys.argv[sys.argv.index('--output') + 1], 'w').write(json.dumps(found))\n"
        f"print({error!r}, file=sys.stderr)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def pinned(tmp_path: Path) -> str:
    (tmp_path / "constraints.txt").write_text("h11==0.1\n")
    return str(tmp_path / "constraints.txt")


def package(*advisories: str) -> dict[str, Any]:
    return {"name": "h11", "version": "0.1", "vulns": [{"id": each, "fix_versions": ["0.2"]} for each in advisories]}


def test_an_advisory_is_a_line_and_a_failure(tmp_path: Path, pinned: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"dependencies": [package("PYSEC-1"), package()]}
    assert audit(program(tmp_path, found, "Found 1 known vulnerability"), pinned) == 1
    assert capsys.readouterr().out == "h11 0.1: PYSEC-1; fixed in 0.2\nmake audit: 2 packages, 1 advisories\n"


def test_without_an_advisory_it_ends_well(tmp_path: Path, pinned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(program(tmp_path, {"dependencies": [package()]}), pinned) == 0
    assert capsys.readouterr().out == "make audit: 1 packages, 0 advisories\n"


def test_packages_that_were_not_looked_up_are_named(
    tmp_path: Path, pinned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"dependencies": [package(), {"name": "own", "skip_reason": "not found"}]}
    assert audit(program(tmp_path, found), pinned) == 0
    assert capsys.readouterr().out == "1 packages could not be looked up: own\nmake audit: 1 packages, 0 advisories\n"


def test_a_service_without_data_is_a_failure(tmp_path: Path, pinned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(program(tmp_path, {"dependencies": [package()]}, has_data=False), pinned) == 1
    captured = capsys.readouterr()
    assert "0 advisories" not in captured.out
    assert "does not know the advisories of jinja2" in captured.err


@pytest.mark.parametrize("error", ["requests.exceptions.ConnectionError: Max retries exceeded", "error: no such file"])
def test_an_audit_that_was_not_made_is_a_failure(
    tmp_path: Path, pinned: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(program(tmp_path, None, f"Traceback ...\n{error}"), pinned) == 1
    assert capsys.readouterr().err == f"make audit: not made: {error}\n"


def test_it_is_a_script() -> None:
    """`make` runs the file itself, so it imports nothing of the project."""
    script = Path(__file__).parents[2] / "tools" / "audit.py"
    done = subprocess.run(
        [sys.executable, "-I", script, "/bin/false", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "make audit: not made: no output\n"


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
