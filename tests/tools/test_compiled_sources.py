"""The copies that mypyc compiles say what the originals do."""

from __future__ import annotations

import ast
import copyreg
import inspect
import sys
from dataclasses import fields, is_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from ampd.compiled import source_of
from ampd.policies.registry import Policy, Registry
from tools.compile import modules
from tools.compiled_sources import prepared

SOURCE = '''"""Doc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Point:
    """A point.

    Attributes:
        x, y: where it is.
    """

    x: int
    y: float = 0.5
    names: Mapping[str, int] = field(default_factory=dict)

    @property
    def far(self) -> bool:
        return self.x > 100


@dataclass(slots=True, kw_only=True)
class Base:
    a: int


@dataclass(slots=True, kw_only=True)
class Derived(Base):
    b: tuple[int, ...] = ()
'''


_ADD = Registry.add


def _add_originals(registry: Registry[Any], name: str, policy: type[Policy]) -> None:
    """As `Registry.add`, for all but the copies. A copy may be the first that imports another policy."""
    if policy.__module__ != "copied":
        _ADD(registry, name, policy)


def made(source: str) -> ModuleType:
    """A module from its text. A policy in it is not registered: the original has its name."""
    module = ModuleType("copied")
    sys.modules["copied"] = module
    try:
        with patch.object(Registry, "add", _add_originals):
            exec(source, module.__dict__)
    finally:
        del sys.modules["copied"]
    return module


def test_a_written_out_dataclass_is_made_and_compared_as_the_original() -> None:
    original, copy = made(SOURCE), made(prepared(SOURCE))
    for values in ((3,), (3, 1.5), (3, 1.5, {"n": 1})):
        assert repr(copy.Point(*values)) == repr(original.Point(*values))
    assert copy.Point(3) == copy.Point(3, 0.5, {})
    assert copy.Point(1).names is not copy.Point(1).names
    assert hash(copy.Point(1, 2.0, ())) == hash(original.Point(1, 2.0, ()))
    assert copy.Derived(a=1).b == ()
    with pytest.raises(TypeError, match="positional"):
        copy.Derived(1)


def test_a_written_out_dataclass_is_pickled_by_its_fields() -> None:
    copy = made(prepared(SOURCE))
    for original in (copy.Point(3, 1.5, {"n": 1}), copy.Derived(a=1, b=(2,))):
        reduced: Any = copyreg.dispatch_table[type(original)](original)
        function, arguments = reduced
        assert function(*arguments) == original


def test_the_shared_state_finds_the_annotations_of_a_written_out_dataclass() -> None:
    """mypyc keeps less of them, so the copy sets them once more."""
    original, source = made(SOURCE), prepared(SOURCE)
    for name in ("Point", "Base", "Derived"):
        line = next(line for line in source.splitlines() if line.startswith(f"getattr({name}, '__annotations__')"))
        less = SimpleNamespace(__annotations__={})
        exec(line, {name: less})
        assert less.__annotations__ == vars(original)[name].__annotations__


def test_a_dataclass_without_a_blank_line_behind_its_fields_is_an_error() -> None:
    with pytest.raises(ValueError, match="Point: no blank line"):
        prepared(SOURCE.replace("(default_factory=dict)\n\n", "(default_factory=dict)\n"))


def test_no_line_moves() -> None:
    """So that an error names the line of the original."""

    def lines(text: str) -> dict[str, int]:
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        added = ("__init__", "_reduced_")
        return {f"{node.name} {node.lineno}": node.lineno for node in found if not node.name.startswith(added)}

    for name in modules():
        source = source_of(name).read_text()
        assert lines(prepared(source)) == lines(source), name


def test_every_dataclass_takes_the_same_arguments() -> None:
    tried = [name for name in modules() if "@dataclass" in source_of(name).read_text()]
    assert tried
    for name in tried:
        source = source_of(name).read_text()
        original, copy = made(source), made(prepared(source))
        for class_name, kind in vars(original).items():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == "copied":
                ours = inspect.signature(vars(copy)[class_name]).parameters.values()
                theirs = inspect.signature(kind).parameters.values()
                about = f"{name}: {class_name}"
                assert [(each.name, each.kind) for each in ours] == [(each.name, each.kind) for each in theirs], about
                assert [each.name for each in fields(vars(copy)[class_name])] == [each.name for each in fields(kind)], (
                    about
                )
