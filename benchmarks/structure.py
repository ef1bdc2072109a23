"""Measures the structure of the product: lines, functions, classes, imports between packages.

    python -m benchmarks.structure [--json] [--root FOLDER]

Counts every line of the product's Python and Lua files (tests, benchmarks and docs are not product). Lines of code are
those that are neither blank, nor comment, nor documentation. A class is over the limit if its constructor takes more
than 8 parameters or more than 12 mutable fields. A field that only keeps a parameter of the constructor is not
mutable. Frozen dataclasses, pydantic models, typed dictionaries and protocols are values, not state, and do not count.
Other dataclasses are records, listed apart: their fields are what they are for, so only the limit of fields holds.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

PRODUCT = ("ampd", "planner", "router", "workers", "workloads")
MOST_PARAMETERS = 8
MOST_FIELDS = 12
MOST_LINES = 500
_VALUES = {"BaseModel", "TypedDict", "Protocol", "NamedTuple", "Enum", "StrEnum", "Settings", "Policy", "Struct"}


@dataclass(frozen=True, slots=True)
class ClassSize:
    """One class: parameters of its constructor (without `self`), and mutable fields."""

    where: str
    parameters: int
    fields: int
    is_record: bool

    @property
    def is_over(self) -> bool:
        """Whether the class has more state than one reader keeps in mind."""
        return self.fields > MOST_FIELDS or (self.parameters > MOST_PARAMETERS and not self.is_record)


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python module of the product with its syntax tree."""
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root), ast.parse(path.read_text("utf-8"))


def classes(path: Path, tree: ast.Module) -> Iterator[ClassSize]:
    """The classes of a module that hold state."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not _is_value(node):
            yield ClassSize(f"{path}:{node.name}", _parameters(node), len(_fields(node)), _is_record(node))


def measured(root: Path) -> dict[str, Any]:
    """All figures of a source tree."""
    lines: Counter[str] = Counter()
    code: Counter[str] = Counter()
    files: Counter[str] = Counter()
    imports: Counter[str] = Counter()
    functions: list[tuple[int, str]] = []
    sizes: list[ClassSize] = []
    for package in PRODUCT:
        for path in (*(root / package).rglob("*.py"), *(root / package).rglob("*.lua")):
            lines[package] += len(path.read_text("utf-8").splitlines())
            files[package] += 1
    for path, tree in modules(root):
        code[path.parts[0]] += len(_code_lines((root / path).read_text("utf-8"), tree))
        sizes += classes(path, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.name}"))
            if isinstance(node, ast.ImportFrom) and node.module:
                imports[f"{_package(str(path.with_suffix('')).replace('/', '.'))} -> {_package(node.module)}"] += 1
    pairs = {pair: count for pair, count in imports.items() if _is_between(pair)}
    over = sorted((size for size in sizes if size.is_over), key=lambda size: -size.fields)
    return {
        "lines": dict(lines) | {"product": lines.total()},
        "code_lines": dict(code) | {"product": code.total()},
        "files": dict(files) | {"product": files.total()},
        "functions": len(functions),
        "function_lines_mean": round(mean(length for length, _ in functions), 1),
        "functions_longest": [f"{length} {where}" for length, where in sorted(functions, reverse=True)[:10]],
        "classes": len(sizes),
        "classes_over_limit": [_line(size) for size in over if not size.is_record],
        "records_over_limit": [_line(size) for size in over if size.is_record],
        "arrows_between_packages": len(pairs),
        "imports_between_packages": pairs,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.structure", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    figures = measured(given.root)
    if given.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"{name}: {len(value)}", *value, sep="\n  ")
        elif isinstance(value, dict):
            print(f"{name}: {', '.join(f'{key} {count}' for key, count in value.items())}")
        else:
            print(f"{name}: {value}")


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor comment, nor documentation."""
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    return {number for number, line in lines.items() if line and not line.startswith("#")} - texts


def _line(size: ClassSize) -> str:
    return f"{size.parameters} parameters, {size.fields} fields: {size.where}"


def _is_record(node: ast.ClassDef) -> bool:
    return any(_name(mark) == "dataclass" for mark in node.decorator_list)


def _is_value(node: ast.ClassDef) -> bool:
    bases = {_name(base) for base in node.bases}
    frozen = any(
        isinstance(mark, ast.Call)
        and _name(mark.func) == "dataclass"
        and any(item.arg == "frozen" and _is_true(item.value) for item in mark.keywords)
        for mark in node.decorator_list
    )
    return frozen or any(base in _VALUES or base.endswith(("Settings", "Error")) for base in bases)


def _parameters(node: ast.ClassDef) -> int:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return len(item.args.posonlyargs + item.args.args + item.args.kwonlyargs) - 1
    if _is_record(node):
        return sum(isinstance(item, ast.AnnAssign) for item in node.body)
    return 0


def _fields(node: ast.ClassDef) -> set[str]:
    """The mutable fields: of a record all of them, else those that do more than keep a parameter of the constructor."""
    if _is_record(node):
        return {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
    return {name for item in ast.walk(node) for name in _own_names(item) if not _keeps_parameter(item)}


def _own_names(item: ast.AST) -> list[str]:
    """Names that a statement sets on `self`."""
    owned = [target for target in _targets(item) if isinstance(target, ast.Attribute)]
    return [target.attr for target in owned if isinstance(target.value, ast.Name) and target.value.id == "self"]


def _keeps_parameter(item: ast.AST) -> bool:
    """Whether a statement is `self._name = name`."""
    names = [name.lstrip("_") for name in _own_names(item)]
    return isinstance(item, ast.Assign) and isinstance(item.value, ast.Name) and names == [item.value.id]


def _targets(item: ast.AST) -> list[ast.expr]:
    if isinstance(item, ast.Assign):
        return [
            part for target in item.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [item.target] if isinstance(item, ast.AnnAssign | ast.AugAssign) else []


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _package(module: str) -> str:
    """`ampd.policies` of `ampd.policies.routing.ampd`; of other packages the first name."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "ampd" else parts[0]


def _is_between(pair: str) -> bool:
    source, _, target = pair.partition(" -> ")
    return target.split(".")[0] in PRODUCT and source != target


if __name__ == "__main__":
    main()
