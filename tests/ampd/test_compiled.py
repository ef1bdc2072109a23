"""Which modules are imported where compiled ones were built."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampd import compiled


@pytest.fixture(autouse=True)
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a build, and a source in it that was compiled."""
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    (tmp_path / "part.py").write_text("x = 1\n")
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    compiled.state.cache_clear()
    compiled._hashes.cache_clear()


def note(folder: Path) -> None:
    (folder / compiled.HASHES_FILE).write_text(json.dumps({"part": compiled.hash_of(folder / "part.py")}))


@pytest.mark.parametrize("notes", [None, "", "[]", "{", "\\xff"])
def test_without_a_build_everything_is_pure_python(build: Path, notes: str | None) -> None:
    """A build that broke off has no notes."""
    if notes is not None:
        (build / compiled.HASHES_FILE).write_text(notes)
    assert compiled.state() == "pure Python: not built (make compiled)"
    assert not is_used()


def is_used() -> bool:
    """Whether imports look for the build first from now on."""
    before = sys.meta_path[:]
    try:
        compiled.install()
        return sys.meta_path != before
    finally:
        sys.meta_path[:] = before


def test_a_build_of_these_sources_is_used(build: Path) -> None:
    note(build)
    assert is_used()
    spec = compiled._Finder().find_spec("part")
    assert compiled.state() == "compiled"
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.startswith(str(build / compiled.LIBRARY))
    assert compiled._Finder().find_spec("other") is None


@pytest.mark.parametrize("change", ["y = 1\n", None])
def test_a_build_of_other_sources_is_not_used(build: Path, change: str | None) -> None:
    note(build)
    if change is None:
        (build / "part.py").unlink()
    else:
        (build / "part.py").write_text(change)
    assert not is_used()
    assert compiled.state() == "pure Python: part differs from what was built (make compiled)"
