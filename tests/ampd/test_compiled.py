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
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
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


def test_without_a_build_everything_is_pure_python() -> None:
    assert compiled.state() == "pure Python: not built (make compiled)"
    assert compiled._Finder().find_spec("part") is None


def test_a_build_of_these_sources_is_used(build: Path) -> None:
    note(build)
    spec = compiled._Finder().find_spec("part")
    assert compiled.state() == "compiled"
    assert spec is not None
    assert spec.origin is not None
    assert spec.origin.startswith(str(build / compiled.LIBRARY))
    assert compiled._Finder().find_spec("other") is None


def test_a_process_says_what_it_runs(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, compiled._Finder)])
    note(build)
    assert compiled.in_use() == "pure Python"
    compiled.install()
    assert compiled.in_use() == "compiled"


@pytest.mark.parametrize("change", ["y = 1\n", None])
def test_a_build_of_other_sources_is_not_used(build: Path, change: str | None) -> None:
    note(build)
    if change is None:
        (build / "part.py").unlink()
    else:
        (build / "part.py").write_text(change)
    assert compiled._Finder().find_spec("part") is None
    assert compiled.state() == "pure Python: part differs from what was built (make compiled)"


def test_compiled_and_interpreted_modules_do_not_mix(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(build)
    monkeypatch.setitem(sys.modules, "part", sys)
    assert compiled._Finder().find_spec("part") is None
    assert compiled.state() == "pure Python: part was imported before"


def test_the_environment_variable_leaves_the_build_out(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(build)
    monkeypatch.setenv(compiled.VARIABLE, "0")
    assert compiled.state() == "pure Python: AMPD_COMPILED is 0"
    assert compiled._Finder().find_spec("part") is None
