"""HTML reports: one file that needs nothing else, and figures as text. An unknown figure is `-`."""

from __future__ import annotations


def format_share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def format_ms(value_s: float | None, digits: int = 1) -> str:
    """Seconds as a number of milliseconds."""
    return "-" if value_s is None else f"{value_s * 1e3:,.{digits}f}"


def format_number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """A number with so many significant digits, and with all digits before the point; `sign`: as of a format."""
    if value is None:
        return "-"
    text = f"{value:{sign}.{digits}g}"
    return f"{value:{sign}.0f}" if "e+" in text else text


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
