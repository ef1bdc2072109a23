"""The limits that keep the code easy to carry. The import rules are in pyproject.toml."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.structure import MOST_LINES, classes, modules

_ROOT = Path(__file__).parents[1]
_SOURCES = list(modules(_ROOT))


@pytest.mark.slow
def test_no_class_has_more_state_than_a_reader_keeps_in_mind() -> None:
    sizes = [size for path, tree in _SOURCES for size in classes(path, tree)]
    assert [size for size in sizes if size.is_over and not size.is_record] == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path): len((_ROOT / path).read_text("utf-8").splitlines()) for path, _ in _SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_variable_has_a_name_of_its_own() -> None:
    named_one = [
        f"{path}:{node.lineno}"
        for path, tree in _SOURCES
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "one") or (isinstance(node, ast.arg) and node.arg == "one")
    ]
    assert named_one == []


def test_every_logger_has_the_same_name() -> None:
    loggers = {
        f"{path}: {ast.unparse(node.targets[0])}"
        for path, tree in _SOURCES
        for node in tree.body
        if isinstance(node, ast.Assign) and "getLogger" in ast.unparse(node.value)
    }
    assert [line for line in sorted(loggers) if not line.endswith(": log")] == []
