"""Checks of reports from workers: one that publishes nonsense must not mislead every decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ampd.types import Count, Seconds, Text

Check = Callable[[Any], object]


def check_duration(value: Any) -> None:
    """A finite number of at least 0."""
    msgspec.convert(value, Seconds)


def check_count(value: Any) -> None:
    """A whole number of at least 0."""
    msgspec.convert(value, Count)


def check_text(value: Any) -> None:
    """A text of bounded length."""
    msgspec.convert(value, Text)


def check_counts(value: Any) -> None:
    """A table of counts."""
    msgspec.convert(value, dict[str, Count])
