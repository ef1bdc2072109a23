"""The shortest simple JSON value that fits a JSON Schema: what a modelled engine answers within a grammar."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "time": "00:00:00Z",
    "uri": "http://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_UNSERVED = ("pattern", "not", "if", "contains", "dependentRequired", "dependentSchemas")
_DEEPEST = 40
"""Nested schemas before a schema counts as one that only an endless value fits."""
_MOST_WORK = 50_000
"""Units of work on one schema, because the schema is a client's and the work holds up the worker's event loop.

A unit is a schema that is looked at, an entry that is merged, or a few characters. It takes some microseconds.
"""
_CHARACTERS_PER_UNIT = 32
_EXCEPTION = 4
"""Units that an exception takes."""
_LONGEST_QUOTED = 100


class UnservedSchemaError(Exception):
    """No value can be made for a schema: it uses a keyword that is not understood here, or no value fits it."""


class _TooDeepError(UnservedSchemaError):
    """A value needs more nested schemas than are tried now."""


class _TooMuchWorkError(UnservedSchemaError):
    """The work on the schema has reached its bound."""


def minimal_json(schema: Any) -> Any:
    """A small value that fits a JSON Schema: required properties only, and the shortest of the least nested forms.

    The depths are tried one after the other, because the forms of a recursive schema multiply with each depth. Its
    value is found at a small depth.

    Raises:
        UnservedSchemaError: no value was found with a bounded amount of work.
    """
    minimal = _Minimal(schema)
    for deepest in range(_DEEPEST + 1):
        minimal.deepest = deepest
        with suppress(_TooDeepError):
            return minimal.value(schema, 0)
    raise UnservedSchemaError("it refers to itself without an end")


class _Minimal:
    """Values for the parts of one schema, whose references point into it.

    Attributes:
        deepest: a value with more nested schemas than this is not searched.
    """

    def __init__(self, root: Any) -> None:
        self.deepest = 0
        self._root = root
        self._work = 0

    def value(self, schema: Any, depth: int) -> Any:
        self._spend(1)
        if depth > self.deepest:
            self._spend(_EXCEPTION)
            raise _TooDeepError
        if schema is False:
            raise UnservedSchemaError("it allows no value")
        if not isinstance(schema, Mapping):
            return {}
        schema = self._resolved(schema)
        if "const" in schema:
            self._length(schema["const"])
            return schema["const"]
        if "enum" in schema:
            return min(schema["enum"], key=self._length)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                rest = {name: part for name, part in schema.items() if name != word}
                return self._shortest([self._of(self._merged([rest, form]), depth) for form in schema[word]])
        if unserved := next((word for word in _UNSERVED if schema.get(word)), None):
            raise UnservedSchemaError(f"the keyword {unserved} is not understood")
        kinds = schema.get("type") or _kind_of(schema)
        if isinstance(kinds, list):
            self._spend(len(kinds) * len(schema))
            return self._shortest([self._of({**schema, "type": kind}, depth) for kind in kinds])
        return self._typed(kinds, schema, depth)

    def _of(self, schema: Any, depth: int) -> Callable[[], Any]:
        return lambda: self.value(schema, depth + 1)

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise _TooMuchWorkError("its smallest value is too long, or it has too many forms")

    def _length(self, value: Any) -> int:
        length = len(json.dumps(value))
        self._spend(1 + length // _CHARACTERS_PER_UNIT)
        return length

    def _shortest(self, forms: Iterable[Callable[[], Any]]) -> Any:
        """The shortest value of several forms, those left out that have none."""
        values, reason = [], UnservedSchemaError("it has a choice between no forms")
        for number, form in enumerate(forms):
            try:
                values.append(form())
            except _TooMuchWorkError:
                raise
            except UnservedSchemaError as error:
                # A form that is too deep counts first, because a value may be found at the next depth.
                if number == 0 or isinstance(error, _TooDeepError):
                    reason = error
        if not values:
            raise reason
        return min(values, key=self._length)

    def _typed(self, kind: Any, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return _number(schema)
        if kind == "boolean":
            return False
        if kind == "null":
            return None
        raise UnservedSchemaError(f"the type {_quoted(kind)} is not understood")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        names = list(schema.get("required") or ())
        self._spend(sum(map(len, names)) // _CHARACTERS_PER_UNIT)
        missing = schema.get("minProperties", 0) - len(names)
        if missing > 0:
            self._spend(len(properties))
            known = set(names)
            names += [name for name in properties if name not in known][:missing]
        return {name: self.value(properties.get(name, others), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        if schema.get("uniqueItems") and schema.get("minItems", 0) > 1:
            raise UnservedSchemaError("the keyword uniqueItems is not understood for more than one item")
        first, rest = schema.get("prefixItems") or (), schema.get("items", True)
        parts = (first[at] if at < len(first) else rest for at in range(schema.get("minItems", 0)))
        return [self.value(part, depth + 1) for part in parts]

    def _string(self, schema: Mapping[str, Any]) -> str:
        text = _FORMATS.get(schema.get("format", ""), "")
        missing: int = schema.get("minLength", 0) - len(text)
        self._spend(max(0, missing) // _CHARACTERS_PER_UNIT)
        return text + "a" * missing

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema without references and `allOf` at its top."""
        for _ in range(_DEEPEST):
            if "$ref" not in schema and not schema.get("allOf"):
                return schema
            parts: list[Any] = [{name: part for name, part in schema.items() if name not in ("$ref", "allOf")}]
            parts += [self._target(schema["$ref"])] if "$ref" in schema else []
            parts += schema.get("allOf") or []
            schema = self._merged(parts)
        raise UnservedSchemaError("it refers to itself without an end")

    def _target(self, reference: str) -> Any:
        self._spend(len(reference) // _CHARACTERS_PER_UNIT)
        if not reference.startswith("#"):
            raise UnservedSchemaError(f"the reference {_quoted(reference)} leads out of it")
        part = self._root
        for name in reference[1:].split("/")[1:]:
            try:
                part = part[name.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError):
                raise UnservedSchemaError(f"the reference {_quoted(reference)} leads nowhere") from None
        return part

    def _merged(self, schemas: Iterable[Any]) -> dict[str, Any]:
        """One schema that asks for what all of them ask for, as far as minimal values need it."""
        whole: dict[str, Any] = {}
        for schema in schemas:
            if schema is False:
                raise UnservedSchemaError("it allows no value")
            for name, part in (schema if isinstance(schema, Mapping) else {}).items():
                self._spend(1)
                if name in whole and name in ("properties", "$defs", "required", "allOf"):
                    self._spend(len(whole[name]) + len(part))
                    whole[name] = _joined(name, whole[name], part)
                else:
                    whole[name] = part
        return whole


def _joined(name: str, first: Any, second: Any) -> Any:
    """The entries of both, where a keyword stands in two schemas."""
    if name in ("properties", "$defs"):
        return {**first, **second}
    return [*first, *second] if name == "allOf" else list(dict.fromkeys([*first, *second]))


def _quoted(text: Any) -> str:
    """The name of a type or a reference in an error, unless it is too long for one line."""
    return repr(text) if isinstance(text, str) and len(text) <= _LONGEST_QUOTED else "that is given"


def _kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a schema without one means by its other keywords."""
    kinds = {
        "array": ("items", "prefixItems", "minItems"),
        "string": ("minLength", "format"),
        "number": ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
    }
    return next((kind for kind, words in kinds.items() if any(word in schema for word in words)), "object")


def _number(schema: Mapping[str, Any]) -> float:
    step = schema.get("multipleOf", 1)
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    if low <= 0 <= high and 0 not in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
        return 0
    value: float = math.ceil(low / step) * step if low > 0 or math.isinf(high) else math.floor(high / step) * step
    if value == schema.get("exclusiveMinimum"):
        value += step
    elif value == schema.get("exclusiveMaximum"):
        value -= step
    if not low <= value <= high or value in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
        if schema.get("type") == "integer" or math.isinf(low) or math.isinf(high):
            raise UnservedSchemaError(f"no whole number from {low:.15g} to {high:.15g} was found")
        return float(low + high) / 2
    return value
