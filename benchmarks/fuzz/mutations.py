"""Random changes of inputs: of values as JSON and msgpack carry them, of texts, and of bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_DEEP: Any = "deep"
for _ in range(60):
    _DEEP = [_DEEP]

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**64 - 1, 2**64, -(2**63), 10**30, 2**1023, 10**400, -(10**400),
    0.0, -0.0, 0.5, -1.5, 5e-324, 1e300, 1.7e308, -1.7e308, float("inf"), float("-inf"), float("nan"),
    "", "0", "1e400", "n/a", "\x00", "é" * 40, "\ud800", "x" * 600, b"", b"\xff" * 32,
    [], [[]], [None], ["x"], [-1], [2**40], {}, {"": None}, {"x": {}}, _DEEP,
)  # fmt: skip
"""What may stand where something else is expected."""

_TEXTS = (
    "[" * 20_000,
    "{" * 3000,
    "9" * 5000,
    '"',
    "\\",
    "\x00",
    "\r\n",
    ",",
    ":",
    "null",
    "1e400",
    "-1e400",
    "1" + "0" * 400,
    "NaN",
    "\ud800",
    "%",
    "#",
)


def changed(rng: random.Random, value: Any, most: int = 3) -> Any:
    """A copy of a value with one to `most` changes anywhere in it."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, most)):
        value = _change(rng, value)
    return value


def _change(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        return _change_dict(rng, value)
    if isinstance(value, list) and value and rng.random() < 0.85:
        return _change_list(rng, value)
    if isinstance(value, bytes) and rng.random() < 0.7:
        return changed_bytes(rng, value)
    if isinstance(value, str) and rng.random() < 0.5:
        return changed_text(rng, value)
    if type(value) in (int, float) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 1000, str(value)[:40], rng.random() * 10))
    return copy.deepcopy(rng.choice(ODD))


def _change_dict(rng: random.Random, value: dict[Any, Any]) -> dict[Any, Any]:
    key = rng.choice(list(value))
    kind = rng.random()
    if kind < 0.12:
        del value[key]
    elif kind < 0.2:
        value[rng.choice(("x", "", key * 2 if isinstance(key, str) else "y"))] = copy.deepcopy(rng.choice(ODD))
    elif kind < 0.26:
        value[key], other = value[rng.choice(list(value))], value[key]
        value[rng.choice(list(value))] = other
    else:
        value[key] = _change(rng, value[key])
    return value


def _change_list(rng: random.Random, value: list[Any]) -> list[Any]:
    at = rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.15:
        del value[at]
    elif kind < 0.25:
        value.insert(at, copy.deepcopy(rng.choice(ODD)))
    elif kind < 0.35:
        value += copy.deepcopy(value[at:])
    else:
        value[at] = _change(rng, value[at])
    return value


def changed_text(rng: random.Random, text: str) -> str:
    """A text with a part removed, repeated, replaced or inserted."""
    start = rng.randint(0, len(text))
    end = rng.randint(start, min(len(text), start + rng.choice((1, 3, 20, 200))))
    return rng.choice(
        (
            text[:start] + text[end:],
            text[:end] + text[start:],
            text[:start] + rng.choice(_TEXTS) + text[end:],
            text[:start] + chr(rng.choice((0, 10, 34, 44, 0x7F, 0xE9, 0x4E00, 0x1F600))) + text[start:],
            text[:start] + str(rng.choice(ODD)) + text[end:],
        )
    )


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a part removed, repeated or replaced."""
    start = rng.randint(0, len(data))
    end = rng.randint(start, min(len(data), start + 16))
    return rng.choice(
        (
            data[:start] + data[end:],
            data[:end] + data[start:],
            data[:start] + rng.randbytes(rng.choice((1, 4, 32))) + data[end:],
            rng.randbytes(rng.randint(0, 64)),
        )
    )


def changed_json(rng: random.Random, value: Any) -> str:
    """A value as JSON, changed before or after it was written."""
    if rng.random() < 0.7:
        try:
            return json.dumps(changed(rng, value), default=str)
        except (RecursionError, ValueError, TypeError):
            pass
    return changed_text(rng, json.dumps(value))
