"""Checks of records from other processes: one worker that publishes nonsense must not mislead every decision."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Check = Callable[[Any], None]

_LONGEST_TEXT = 8192
_MOST_ENTRIES = 1_000_000
_LARGEST_COUNT = 1 << 53
_FARTHEST_BUCKET = 10_000
"""Of latencies. The buckets of a microsecond and of 11 days are within 700 of 0."""
_SIGNED = ("arrival_s",)


def checked(value: T) -> T:
    """A dataclass whose fields, and those of the dataclasses in them, have the annotated types and sensible values.

    Counts are whole numbers of at least 0, times are finite and at least 0, texts and collections have a bounded size.

    Raises:
        ValueError: a field is none of this. The message names it.
    """
    kind: Any = type(value)
    for name, check in _checks(kind):
        try:
            check(getattr(value, name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return value


def check_duration(value: Any) -> None:
    """A finite number of at least 0."""
    check_finite(value)
    if value < 0:
        raise ValueError("is negative")


def check_finite(value: Any) -> None:
    """A finite number."""
    try:
        is_finite = type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        is_finite = False
    if not is_finite:
        raise ValueError("is no finite number")


def check_count(value: Any) -> None:
    """A whole number of at least 0."""
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError("is no whole number of at least 0")


def check_text(value: Any) -> None:
    """A text of bounded length."""
    if type(value) is not str or len(value) > _LONGEST_TEXT:
        raise ValueError(f"is no text of at most {_LONGEST_TEXT} characters")


def _check_bool(value: Any) -> None:
    if type(value) is not bool:
        raise ValueError("is neither true nor false")


def check_counts(value: Any) -> None:
    """A table of counts."""
    # JSON has only texts as keys. Views hold thousands of sessions, hence no loop in Python.
    if not isinstance(value, Mapping) or len(value) > _MOST_ENTRIES or not set(map(type, value.values())) <= {int}:
        raise ValueError("is no table of whole numbers")
    check_count(min(value.values(), default=0))
    check_count(max(value.values(), default=0))


def _check_all(values: Any) -> None:
    if len(values) > _MOST_ENTRIES:
        raise ValueError("is too long")
    for value in values:
        checked(value)


def _check_buckets(value: Any) -> None:
    check_counts(value)
    if any(type(bucket) is not int or abs(bucket) > _FARTHEST_BUCKET for bucket in value):
        raise ValueError("is no table of buckets")


def _check_routes(value: Any) -> None:
    check_counts(value)
    for route, reason in value:
        check_text(route)
        check_text(reason)


_BY_ANNOTATION: Mapping[str, Check] = {
    "int": check_count,
    "float": check_duration,
    "str": check_text,
    "bool": _check_bool,
    "Mapping[str, int]": check_counts,
    "tuple[PrefillTask, ...]": _check_all,
    "Mapping[int, int]": _check_buckets,
    "Mapping[tuple[str, str], int]": _check_routes,
    "Slo": checked,
    "Latencies": checked,
    "ServedWindow": checked,
    "Window": checked,
    "Parallelism": checked,
    "QueueRest": checked,
    "KvWindow": checked,
    "Role": lambda _: None,
}


@functools.cache
def _checks(kind: type[Any]) -> tuple[tuple[str, Check], ...]:
    return tuple(
        (name, check_finite if name in _SIGNED else _BY_ANNOTATION[annotation])
        for name, annotation in kind.__annotations__.items()
    )
