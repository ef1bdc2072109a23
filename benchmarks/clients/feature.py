"""A row of the table: code that the client's interpreter runs. It raises if the feature fails.

The code finds `URL` (of the frontend), `SESSION` (a session of its own) and what the client's preamble defines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONTEXT_TOKENS = 4096

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "is_far": {"type": "boolean"}},
    "required": ["city", "is_far"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


LOOP = (
    {"content": "I add.", "tool_calls": [call("add", a=1, b=2), call("add", a=3, b=4)]},
    {"content": "I add again.", "tool_calls": [call("add", a=3, b=7)]},
    {"content": "It is 10."},
)
"""Three rounds of an agent, the first with two calls at a time."""

CALLS = ({"tool_calls": [call("add", a=3, b=7)]}, {"content": "It is 10."})
"""Two rounds of an agent, a call without any text and the answer."""


GUIDED = {"content": '{"city": "Oslo", "is_far": false}'}
"""An answer that fits `SCHEMA`."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table.

    Attributes:
        before: how it failed before it was fixed; empty: it never did.
        replies: the scripted replies of its session; a random model has none, so such a row is for the modelled engine.
        guided: the scripted reply to a request with a grammar. Another engine follows the grammar itself.
        fault: the section of docs/dynamo-known.md, if Dynamo cannot do it. The code asserts the failure as it is there.
    """

    name: str
    code: str
    before: str = ""
    replies: tuple[dict[str, Any], ...] = ()
    guided: dict[str, Any] | None = None
    fault: str = ""


FAULTS = "faults"
"""Sections of docs/dynamo-known.md."""

PYTHON, NODE = "Python", "Node"


@dataclass(frozen=True, slots=True)
class Client:
    """A package. `module`: what shows that it is installed; `language`: of its rows' code, Python or Node."""

    name: str
    module: str
    preamble: str
    features: tuple[Feature, ...] = field(default=())
    language: str = PYTHON


def session_of(client: Client, feature: Feature) -> str:
    """The session of a row, by which its scripted replies are found."""
    return f"{client.module}-{client.features.index(feature)}"
