"""Tables with columns of fixed width. If a table is wider than the terminal, it drops the least important columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.text import Text

from ampd.cli.top.snapshot import Row
from ampd.cli.top.units import printable

MISSED = "bold red"
QUIET = "dim"


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of one field; `is_missed`: it misses its target."""

    text: str
    is_missed: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        width: in characters.
        keep: columns with higher numbers stay longer when the terminal is narrow.
        cell: the field of a row.
        is_left: the text is aligned to the left.
    """

    title: str
    width: int
    keep: int
    cell: Callable[[Row], Cell | str]
    is_left: bool = False


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into `width`; the first one always stays."""
    kept = list(columns)
    while len(kept) > 1 and sum(column.width + 1 for column in kept) - 1 > width:
        kept.remove(min(kept[1:], key=lambda column: column.keep))
    return kept


def table(columns: Sequence[Column], rows: Iterable[Row], width: int) -> list[Text]:
    """A heading and one line per row, each at most `width` wide; nothing without rows."""
    kept = fitting(columns, width)
    lines = [_line(kept, [column.cell(row) for column in kept], width, Text()) for row in rows]
    heading = _line(kept, [column.title for column in kept], width, Text(style=QUIET))
    return [heading, *lines] if lines else []


def clipped(text: Text, width: int) -> Text:
    """The line, with an ellipsis at its end if it was wider than `width`."""
    text.truncate(max(width, 1), overflow="ellipsis")
    return text


def _line(columns: Sequence[Column], cells: Iterable[Cell | str], width: int, line: Text) -> Text:
    for column, content in zip(columns, cells, strict=True):
        cell = Cell(content) if isinstance(content, str) else content
        line.append(" " if column is not columns[0] else "")
        line.append(_padded(printable(cell.text), column), style=MISSED if cell.is_missed else None)
    line.rstrip()
    return clipped(line, width)


def _padded(text: str, column: Column) -> str:
    shown = clipped(Text(text), column.width)
    if column.is_left:
        return set_cell_size(shown.plain, column.width)
    return " " * (column.width - shown.cell_len) + shown.plain
