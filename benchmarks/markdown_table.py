"""Tables in Markdown, as the commands print them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def head(columns: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{row(columns)}\n{row(['---'] * len(columns))}"


def row(cells: Iterable[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return "\n".join([head(columns), *map(row, rows)])


def titled(tables: Mapping[str, str]) -> str:
    """Tables below each other, each behind its title."""
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in tables.items())
