"""The shortest simple JSON value that fits a JSON Schema: what a modelled engine answers within a grammar."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
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
_UNSERVED = ("pattern", "not", "if", "contains", "dependentRequired", "dependentSchemas", "uniqueItems")
_DEEPEST = 40
"""Nested schemas before a schema counts as one that only an endless value fits."""


class UnservedSchemaError(Exception):
    """No value can be made for a schema: it uses a keyword that is not understood here, or no value fits it."""


def minimal_json(schema: Any) -> Any:
    """A small value that fits a JSON Schema: required properties only, and of several forms the shortest.

    Raises:
        UnservedSchemaError: no value was found.
    """
    return _Minimal(schema).value(schema, 0)


class _Minimal:
    """Values for the parts of one schema, whose references point into it."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def value(self, schema: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise UnservedSchemaError("it refers to itself without an end")
        if schema is False:
            raise UnservedSchemaError("it allows no value")
        if not isinstance(schema, Mapping):
            return {}
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return min(schema["enum"], key=_length)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                rest = {name: part for name, part in schema.items() if name != word}
                return _shortest([self._of(_merged([rest, form]), depth) for form in schema[word]])
        if unserved := next((word for word in _UNSERVED if schema.get(word)), None):
            raise UnservedSchemaError(f"the keyword {unserved} is not understood")
        kinds = schema.get("type") or _kind_of(schema)
        if isinstance(kinds, list):
            return _shortest([self._of({**schema, "type": kind}, depth) for kind in kinds])
        return self._typed(kinds, schema, depth)

    def _of(self, schema: Any, depth: int) -> Callable[[], Any]:
        return lambda: self.value(schema, depth + 1)

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return _string(schema)
        if kind in ("integer", "number"):
            return _number(schema)
        if kind == "boolean":
            return False
        if kind == "null":
            return None
        raise UnservedSchemaError(f"the type {kind!r} is not understood")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        names = list(schema.get("required") or ())
        missing = max(0, schema.get("minProperties", 0) - len(names))
        names += [name for name in properties if name not in names][:missing]
        return {name: self.value(properties.get(name, others), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, rest = list(schema.get("prefixItems") or ()), schema.get("items", True)
        parts = [first[at] if at < len(first) else rest for at in range(schema.get("minItems", 0))]
        return [self.value(part, depth + 1) for part in parts]

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema without references and `allOf` at its top."""
        for _ in range(_DEEPEST):
            parts: list[Any] = [{name: part for name, part in schema.items() if name not in ("$ref", "allOf")}]
            parts += [self._target(schema["$ref"])] if "$ref" in schema else []
            parts += schema.get("allOf") or []
            if len(parts) == 1:
                return schema
            schema = _merged(parts)
        raise UnservedSchemaError("it refers to itself without an end")

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise UnservedSchemaError(f"the reference {reference!r} leads out of it")
        part = self._root
        for name in reference[1:].split("/")[1:]:
            try:
                part = part[name.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError):
                raise UnservedSchemaError(f"the reference {reference!r} leads nowhere") from None
        return part


def _merged(schemas: Iterable[Any]) -> dict[str, Any]:
    """One schema that asks for what all of them ask for, as far as minimal values need it."""
    whole: dict[str, Any] = {}
    for schema in schemas:
        if schema is False:
            raise UnservedSchemaError("it allows no value")
        for name, part in (schema if isinstance(schema, Mapping) else {}).items():
            if name in ("properties", "$defs") and name in whole:
                whole[name] = {**whole[name], **part}
            elif name in ("required", "allOf") and name in whole:
                whole[name] = [*whole[name], *(entry for entry in part if entry not in whole[name])]
            else:
                whole[name] = part
    return whole


def _kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a schema without one means by its other keywords."""
    kinds = {
        "array": ("items", "prefixItems", "minItems"),
        "string": ("minLength", "format"),
        "number": ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
    }
    return next((kind for kind, words in kinds.items() if any(word in schema for word in words)), "object")


def _string(schema: Mapping[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), "")
    missing: int = schema.get("minLength", 0) - len(text)
    return text + "a" * missing


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
            raise UnservedSchemaError(f"no whole number from {low} to {high} was found")
        return float(low + high) / 2
    return value


def _shortest(forms: Iterable[Callable[[], Any]]) -> Any:
    """The shortest value of several forms, those left out that have none."""
    values, reasons = [], []
    for form in forms:
        try:
            values.append(form())
        except UnservedSchemaError as error:
            reasons.append(error)
    if not values:
        raise reasons[0] if reasons else UnservedSchemaError("it has a choice between no forms")
    return min(values, key=_length)


def _length(value: Any) -> int:
    return len(json.dumps(value))
