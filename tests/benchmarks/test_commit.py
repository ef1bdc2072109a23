"""The commit that records of a measurement name."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.commit import UNKNOWN, commit


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_has_its_hash_and_says_when_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    file = tmp_path / "file"
    file.write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    git("tag", "-a", "v1", "-m", "a tag")
    short = git("rev-parse", "--short=7", "HEAD").strip()
    assert commit(tmp_path) == short
    file.write_text("2")
    commit.cache_clear()
    assert commit(tmp_path) == f"{short}-dirty"


def test_other_folders_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == UNKNOWN
    commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) == UNKNOWN
