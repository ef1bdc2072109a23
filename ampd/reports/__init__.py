"""HTML reports: one file that needs nothing else, and figures as text. An unknown figure is `-`."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, in columns. The first one begins at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def format_share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def format_ms(value_s: float | None, digits: int = 1) -> str:
    """Seconds as a number of milliseconds."""
    return "-" if value_s is None else f"{value_s * 1e3:,.{digits}f}"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, and with all digits before the point."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def format_bytes(count: float | None) -> str:
    """A byte count in the unit that fits."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """A number of things in words."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
