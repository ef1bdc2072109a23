"""Tables as the pages have them, so that a new run can be pasted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def head(columns: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{row(columns)}\n{row(['---'] * len(columns))}"


def row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return "\n".join([head(columns), *map(row, rows)])
