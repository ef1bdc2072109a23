"""The limits that keep the code easy to carry. The import rules are in pyproject.toml."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from benchmarks.structure import PRODUCT, measured, modules

_ROOT = Path(__file__).parents[1]
_SOURCES = list(modules(_ROOT))
_FOLDERS = (*PRODUCT, "benchmarks", "docs", "k8s", "tests", "tools")
_MAYBE_NAMED_ONE = re.compile(r"\b(as|def|for|lambda)\s+one\b|[(,*]\s*one\b|\bone\s*[=:,]")
"""What stands beside a name where it is made. Prose has it too, but most files need no parsing."""


BOUNDS = {"lines_of_code": 33_603, "modules": 242, "flags": 193, "words_of_pages": 59_992}
"""They may only fall. A commit that makes the product smaller lowers them. A feature that raises one says for what."""
_SLACK = 1.005


def test_the_product_does_not_grow() -> None:
    figures = measured(_ROOT)
    assert {name: size for name, size in figures.items() if size > BOUNDS[name]} == {}, "larger than the bound"
    loose = {name: figures[name] for name, bound in BOUNDS.items() if bound > _SLACK * figures[name]}
    assert loose == {}, "lower these bounds"


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
