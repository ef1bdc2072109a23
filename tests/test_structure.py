"""The limits that keep the code easy to carry. The import rules are in pyproject.toml."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from benchmarks.structure import MOST_LINES, PRODUCT, classes, modules

_ROOT = Path(__file__).parents[1]
_SOURCES = list(modules(_ROOT))
_FOLDERS = (*PRODUCT, "benchmarks", "docs", "k8s", "tests", "tools")
_LARGE_LINES = 300
"""From here on a newcomer looks for the tests of one module. Small modules may be tested together."""
_MAYBE_NAMED_ONE = re.compile(r"\b(as|def|for|lambda)\s+one\b|[(,*]\s*one\b|\bone\s*[=:,]")
"""What stands beside a name where it is made. Prose has it too, but most files need no parsing."""


@pytest.mark.slow
def test_no_class_has_more_state_than_a_reader_keeps_in_mind() -> None:
    sizes = [size for path, tree in _SOURCES for size in classes(path, tree)]
    assert [size for size in sizes if size.is_over] == []


def test_no_file_is_too_long_to_read() -> None:
    lengths = {str(path): len((_ROOT / path).read_text("utf-8").splitlines()) for path, _ in _SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_large_module_has_tests_that_bear_its_name() -> None:
    large = [path for path, _ in _SOURCES if len((_ROOT / path).read_text("utf-8").splitlines()) > _LARGE_LINES]
    assert large
    without = [path for path in large if not [*(_ROOT / "tests" / path.parent).glob(f"test_{path.stem}*.py")]]
    assert without == []


@pytest.mark.slow
def test_every_variable_has_a_name_of_its_own() -> None:
    """In tests, benchmarks and docs too. `one` says nothing about what it holds."""
    texts = {path: path.read_text("utf-8") for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py"))}
    assert len(texts) > len(_SOURCES)
    named_one = [
        f"{path.relative_to(_ROOT)}:{getattr(node, 'lineno', 0)}"
        for path, text in texts.items()
        if _MAYBE_NAMED_ONE.search(text)
        for node in ast.walk(ast.parse(text))
        if "one" in {getattr(node, field, None) for field in ("id", "arg", "name")}
    ]
    assert named_one == []


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and for type checkers count too, because a reader has to follow them."""
    graph = grimp.build_graph(*PRODUCT, "benchmarks")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > len(_SOURCES)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_every_logger_has_the_same_name() -> None:
    loggers = {
        f"{path}: {ast.unparse(node.targets[0])}"
        for path, tree in _SOURCES
        for node in tree.body
        if isinstance(node, ast.Assign) and "getLogger" in ast.unparse(node.value)
    }
    assert [line for line in sorted(loggers) if not line.endswith(": log")] == []
