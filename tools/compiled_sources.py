"""Prepares copies of modules for mypyc: what Python does when it makes a class is written out, so that it is compiled.

mypyc compiles what the text of a class says. Five things are not in the text:

- `@dataclass` writes an `__init__`. The copy has the same one, on the blank line behind the fields. The copy is not
  `frozen`, because the compiled `__init__` assigns to the fields. Its hash stays.
- Objects travel between processes. What pickle does with a dataclass is written out behind the module. A few other
  classes are marked as picklable. The mark makes each use of an attribute slower, so most classes do not have it.
- Objects of some classes cannot be in cycles. They are marked, so that Python's search for cycles leaves them out.
- pydantic reads the annotations of a policy's fields. mypyc keeps those that are strings. It also believes that
  `Field` returns the value of a field, as its annotation says, unless the copy calls it by an untyped name.
- msgspec checks what the shared state reads by the annotations of dataclasses. Of these mypyc keeps no strings, and
  of `tuple[int, ...]` only `tuple`. So they are written out behind the module.

Nothing else changes, and no line moves: an error names the line of the original.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_FUTURE = "from __future__ import annotations"
_IMPORTS = "; ".join(
    (
        _FUTURE,
        "from copyreg import pickle as _pickle",
        "from functools import partial as _partial",
        "from typing import Any as _Any",
        "from mypy_extensions import mypyc_attr as _mypyc_attr",
    )
)
_FIELD = "from pydantic import Field"
_UNTYPED_FIELD = "from pydantic import Field as _field; Field: _Any = _field"
_OPEN = "serializable=True, allow_interpreted_subclasses=True"
"""Of the two, the first alone leaves `__init__` out where interpreted code makes an object (mypy 2.4)."""
_OPEN_CLASSES = frozenset({"CorrectedModel", "PerformanceModel", "PiecewiseModel", "PrefillQueue", "ScaledModel"})
"""Classes that are no dataclasses, and travel between processes or have interpreted subclasses."""
_ACYCLIC = "acyclic=True"
_ACYCLIC_CLASSES = frozenset(
    {
        "BindingSituation",
        "Factors",
        "GapRun",
        "OrderingSituation",
        "Parallelism",
        "Plan",
        "PlanSituation",
        "PrefillTask",
        "QueueRest",
        "RouteDecision",
        "RouteEstimate",
        "RoutingSituation",
        "Run",
        "RunningRound",
        "SimulatedRound",
        "Situation",
        "SlicingSituation",
        "Slo",
        "StepRun",
        "Wait",
        "Window",
        "WorkerView",
    }
)
"""Classes of which each round makes objects, and whose fields never lead back to the object."""
_LEFT_ALONE = frozenset({"Enum", "Exception", "NamedTuple", "Protocol", "StrEnum"})
"""Bases of classes that stay as they are."""
_PYTHONS_OWN = frozenset({"Sequence", "tuple"})
"""Bases of classes that cannot be native ones."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a dataclass: the parameter of `__init__` for it, and the value that is assigned."""

    name: str
    parameter: str
    value: str


def prepared(source: str) -> str:
    """The text of a module as mypyc gets it.

    Raises:
        ValueError: a class has a form that is not known here; the message names it.
    """
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    for node in classes.values():
        bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
        if _dataclass_options(node) is not None:
            _write_out_init(node, classes, lines)
        elif any(ast.unparse(each).startswith("register(") for each in node.decorator_list) or "Policy" in bases:
            _quote_annotations(node, lines)
        elif bases & _PYTHONS_OWN:
            _mark(node, "native_class=False", lines)
        elif node.name in _OPEN_CLASSES:
            _mark(node, _OPEN, lines)
        elif node.name in _ACYCLIC_CLASSES:
            _mark(node, _ACYCLIC, lines)
    for node in classes.values():
        if _dataclass_options(node) is not None:
            lines += [*_reduction(node, classes), _annotations(node)]
    replaced = {_FUTURE: _IMPORTS, _FIELD: _UNTYPED_FIELD}
    return "\n".join(replaced.get(line, line) for line in lines) + "\n"


def _dataclass_options(node: ast.ClassDef) -> Mapping[str, bool] | None:
    """The options of `@dataclass`; None: the class is no dataclass."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Name) and decorator.id == "dataclass":
            return {}
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
            return {str(word.arg): ast.literal_eval(word.value) for word in decorator.keywords}
    return None


def _write_out_init(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], lines: list[str]) -> None:
    if node.name in _ACYCLIC_CLASSES:
        _mark(node, _ACYCLIC, lines)
    options = _dataclass_options(node) or {}
    fields = list(_fields(node, classes))
    if not fields:
        return
    parameters = ", ".join(["self", *(["*"] if options.get("kw_only") else []), *(each.parameter for each in fields)])
    assignments = "; ".join(f"self.{each.name} = {each.value}" for each in fields)
    own = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    last_line = max((statement.end_lineno or 0 for statement in own), default=0)
    if not last_line or lines[last_line : last_line + 1] not in ([""], []):
        raise ValueError(f"{node.name}: no blank line behind the fields")
    lines[last_line : last_line + 1] = [f"    def __init__({parameters}) -> None: {assignments}"]
    kept = [f"{name}=True" for name in ("kw_only",) if options.get(name)]
    decorator = (
        f"@dataclass({', '.join(['init=False', *kept, *(['unsafe_hash=True'] if options.get('frozen') else [])])})"
    )
    lines[node.decorator_list[0].lineno - 1] = decorator


def _reduction(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """What pickle does with an object of a dataclass: make another one of its fields. As lines behind the module."""
    names = [each.name for each in _fields(node, classes)]
    made = f"{node.name}, ({''.join(f'each.{name}, ' for name in names)})"
    if (_dataclass_options(node) or {}).get("kw_only"):
        made = f"_partial({node.name}, {', '.join(f'{name}=each.{name}' for name in names)}), ()"
    function = f"_reduced_{node.name}"
    return [
        f"def {function}(each: {node.name}) -> _Any: return {made}",
        f"_pickle({node.name}, {function})",
    ]


def _annotations(node: ast.ClassDef) -> str:
    """The annotations of a class as Python keeps them, as a line behind the module."""
    own = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    texts = {ast.unparse(each.target): ast.unparse(each.annotation) for each in own}
    # mypy takes `__annotations__` for an attribute of instances.
    return f"getattr({node.name}, '__annotations__').update({texts!r})"


def _fields(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[_Field]:
    """The fields of a dataclass, those of its bases first."""
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(classes[base.id], classes)
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        name, kind = ast.unparse(statement.target), ast.unparse(statement.annotation)
        if statement.value is None:
            yield _Field(name, f"{name}: {kind}", name)
        elif isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) == "field":
            words = {word.arg: ast.unparse(word.value) for word in statement.value.keywords}
            if "default" in words:
                yield _Field(name, f"{name}: {kind} = {words['default']}", name)
            else:
                made = f"{words['default_factory']}() if {name} is None else {name}"
                yield _Field(name, f"{name}: {kind} | None = None", made)
        else:
            yield _Field(name, f"{name}: {kind} = {ast.unparse(statement.value)}", name)


def _quote_annotations(node: ast.ClassDef, lines: list[str]) -> None:
    """Make strings of the annotations in a class."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            kind = statement.annotation
            line = lines[kind.lineno - 1]
            before, after = line[: kind.col_offset], line[kind.end_col_offset :]
            lines[kind.lineno - 1] = f"{before}{ast.unparse(kind)!r}{after}"


def _mark(node: ast.ClassDef, attribute: str, lines: list[str]) -> None:
    """Write a mark for mypyc on the blank line before a class."""
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
    blank = next(number for number in range(first - 1, 0, -1) if not lines[number])
    lines[blank] = f"@_mypyc_attr({attribute})"
