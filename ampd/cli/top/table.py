"""Tables of fixed columns that never exceed a width: the columns that matter least go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.text import Text

from ampd.cli.top.units import printable

MISSED = "bold red"
QUIET = "dim"


@dataclass(frozen=True, slots=True)
class Cell:
    """What one field shows; `is_missed`: it misses its target."""

    text: str
    is_missed: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        width: in characters.
        keep: the higher, the longer it stays when room gets short.
        is_left: its text begins at the left.
    """

    title: str
    width: int
    keep: int
    is_left: bool = False


def fitting(columns: Sequence[Column], width: int) -> list[int]:
    """Positions of the columns that fit into `width`; the first one always stays."""
    kept = list(range(len(columns)))
    while len(kept) > 1 and sum(columns[place].width + 1 for place in kept) - 1 > width:
        kept.remove(min(kept[1:], key=lambda place: columns[place].keep))
    return kept


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> list[Text]:
    """A heading and one line for each row, each at most `width` wide."""
    kept = fitting(columns, width)
    heading = Text(style=QUIET)
    lines = [_line(columns, kept, [Cell(column.title) for column in columns], width, heading)]
    return lines + [_line(columns, kept, row, width, Text()) for row in rows]


def clipped(text: Text, width: int) -> Text:
    """A line that ends in an ellipsis where it would be wider than `width`."""
    text.truncate(max(width, 1), overflow="ellipsis")
    return text


def _line(columns: Sequence[Column], kept: Sequence[int], row: Sequence[Cell], width: int, line: Text) -> Text:
    for number, place in enumerate(kept):
        column, cell = columns[place], row[place]
        line.append(" " if number else "")
        line.append(_fitted(printable(cell.text), column), style=MISSED if cell.is_missed else None)
    line.rstrip()
    return clipped(line, width)


def _fitted(text: str, column: Column) -> str:
    shown = Text(text)
    shown.truncate(column.width, overflow="ellipsis")
    if column.is_left:
        return set_cell_size(shown.plain, column.width)
    return " " * (column.width - shown.cell_len) + shown.plain
