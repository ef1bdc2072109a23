"""Flags and environment in a manifest. Each flag is one argument, `--name=value`, as in the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_flags(arguments: Sequence[str], values: Mapping[str, str | None]) -> list[str]:
    """The arguments with these flags: in the place of the same flag, else at the end; None removes a flag."""
    rest = dict(values)
    result = []
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag not in values:
            result.append(argument)
        elif (value := rest.pop(flag, None)) is not None:
            result.append(f"{flag}={value}")
    return [*result, *(f"{flag}={value}" for flag, value in rest.items() if value is not None)]


def with_environment(entries: Sequence[Mapping[str, Any]], values: Mapping[str, str]) -> list[dict[str, Any]]:
    """The environment with these variables: in the place of the same variable, else at the end."""
    known = {entry["name"] for entry in entries}
    replaced = [
        {"name": entry["name"], "value": values[entry["name"]]} if entry["name"] in values else dict(entry)
        for entry in entries
    ]
    return [*replaced, *({"name": name, "value": value} for name, value in values.items() if name not in known)]
