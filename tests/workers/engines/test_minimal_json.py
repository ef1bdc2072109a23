"""Small values that fit a JSON Schema."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from workers.engines.minimal_json import UnservedSchemaError, minimal_json


class Step(BaseModel):
    """As agents' libraries describe structured outputs."""

    thought: str = Field(min_length=3)
    score: float = Field(gt=0, lt=1)
    kind: str | None
    next: "Step | None"


class Tree(BaseModel):
    """A recursive model without defaults, as the strict mode of OpenAI wants it: every property is required."""

    left: "Tree | None"
    right: "Tree | None"
    third: "Tree | None"


TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REQUIRED_CALL = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "anyOf": [
            {"properties": {"name": {"enum": ["weather"]}, "parameters": TOOL}, "required": ["name", "parameters"]},
            {"properties": {"name": {"enum": ["s"]}, "parameters": TOOL}, "required": ["name", "parameters"]},
        ],
    },
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {}),
        (True, {}),
        (TOOL, {"city": ""}),
        (REQUIRED_CALL, [{"name": "s", "parameters": {"city": ""}}]),
        ({"enum": ["long", "x"]}, "x"),
        ({"const": {"a": 1}}, {"a": 1}),
        ({"type": ["string", "null"]}, ""),
        ({"type": "integer", "minimum": 3}, 3),
        ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5}, 5),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
        ({"type": "string", "minLength": 2}, "aa"),
        ({"type": "string", "format": "date"}, "2000-01-01"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [False, False]),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, []),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1}, [False]),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2}, [1, 2]),
        ({"allOf": [TOOL, {"properties": {"n": {"type": "null"}}, "required": ["n"]}]}, {"city": "", "n": None}),
        ({"type": "object", "properties": {"a": {"const": 1}, "b": {}}, "minProperties": 1}, {"a": 1}),
        (Step.model_json_schema(), {"thought": "aaa", "score": 0.5, "kind": "", "next": None}),
        (Tree.model_json_schema(), {"left": None, "right": None, "third": None}),
        ({"anyOf": [{"type": "array", "items": TOOL, "minItems": 1}, {"const": "less nested"}]}, "less nested"),
    ],
)
def test_values_fit_their_schema(schema: Any, value: Any) -> None:
    assert minimal_json(schema) == value
    Draft202012Validator(schema).validate(value)


def test_many_tools_with_many_parameters_are_within_the_bounded_work() -> None:
    strings = {f"parameter{number}": {"type": "string", "enum": ["x"] * 10} for number in range(20)}
    parameters = {"type": "object", "properties": strings, "required": list(strings)}
    call = {"properties": {"name": {"enum": ["f"]}, "parameters": parameters}, "required": ["name", "parameters"]}
    (value,) = minimal_json({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": [call] * 64}})
    assert value["parameters"] == dict.fromkeys(strings, "x")


NODE = {"$ref": "#/$defs/node"}
ENDLESS = {"anyOf": [{"properties": {name: NODE}, "required": [name]} for name in "ab"]}
PARTS = [{"required": [f"{part}-{number}" for number in range(2_000)]} for part in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**10},
        {"type": "array", "minItems": 10**10},
        {"type": "array", "minItems": 300, "items": {"type": "array", "minItems": 300}},
        {"type": "array", "minItems": 10_000, "items": {"required": ["n" * 10_000]}},
        {"type": "array", "minItems": 10_000, "items": {"const": "c" * 10_000}},
        {"$defs": {"node": ENDLESS}, **NODE},
        {"allOf": PARTS},
        {"$defs": {"node": {"const": "c" * 100_000}}, "anyOf": [NODE] * 1_000},
    ],
    ids=["text", "list", "nested", "names", "constants", "endless", "merged", "choices"],
)
def test_a_schema_that_would_hold_up_the_worker_is_refused(schema: Any) -> None:
    with pytest.raises(UnservedSchemaError, match="too long, or it has too many forms"):
        minimal_json(schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "array", "uniqueItems": True, "minItems": 2, "items": {"type": "integer"}}, "uniqueItems"),
        ({"$ref": "#"}, "without an end"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "without an end"),
        ({"$ref": "#/$defs/none"}, "nowhere"),
        ({"$ref": "http://example.com/schema"}, "out of it"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no whole number"),
        ({"type": "decimal"}, "decimal"),
        ({"type": {"a": "b" * 1_000}}, "the type that is given is not"),
        ({"anyOf": [{"type": "decimal"}, {"type": "text"}]}, "decimal"),
    ],
)
def test_a_schema_without_a_known_value_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(UnservedSchemaError, match=words):
        minimal_json(schema)
