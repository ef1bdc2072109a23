"""Short text for numbers in narrow columns."""

from __future__ import annotations

NOTHING = "-"


def seconds(value_s: float | None) -> str:
    """A duration in at most 6 characters: `0.4ms`, `812ms`, `1.23s`, `45.6s`, `312s`, `2.5h`."""
    if value_s is None:
        return NOTHING
    if value_s <= 0:
        return "0s"
    if value_s < 0.00995:
        return f"{value_s * 1e3:.1f}ms"
    if value_s < 0.9995:
        return f"{value_s * 1e3:.0f}ms"
    for limit_s, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if value_s < limit_s:
            return f"{value_s:.{digits}f}s"
    hours = value_s / 3600
    return f"{hours:.1f}h" if hours < 999.95 else f"{min(hours, 99999):.0f}h"


def age(value_s: float) -> str:
    """A duration in at most 4 characters: `0.3s`, `12s`, `5m`, `2h`."""
    value_s = max(value_s, 0.0)
    if value_s < 9.95:
        return f"{value_s:.1f}s"
    for limit, unit in ((100, 1), (100 * 60, 60), (1000 * 3600, 3600)):
        if value_s < limit - unit / 2:
            return f"{value_s / unit:.0f}{'s' if unit == 1 else 'm' if unit == 60 else 'h'}"
    return ">41d"


def count(value: float | None) -> str:
    """A number in at most 5 characters: `9999`, `12.3k`, `1.2M`, `345G`."""
    if value is None:
        return NOTHING
    if abs(value) < 9999.5:
        return f"{value:.0f}"
    for limit, unit in ((1e6, "k"), (1e9, "M"), (1e12, "G"), (1e15, "T")):
        if value < limit * 0.9995:
            scaled = value / (limit / 1e3)
            return f"{scaled:.1f}{unit}" if scaled < 99.95 else f"{scaled:.0f}{unit}"
    return "lots"


def rate(value: float | None) -> str:
    """A number per second, with one decimal below 100."""
    return f"{value:.1f}" if value is not None and value < 99.95 else count(value)


def percent(share: float | None) -> str:
    """A share in at most 6 characters: `94.2%`, `100.0%`; never rounded up to all."""
    if share is None:
        return NOTHING
    return f"{share:.1%}" if share >= 1 or share < 0.9995 else "99.9%"


def bar(share: float, width: int) -> str:
    """A share as a bar of `width` characters."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def printable(text: str) -> str:
    """Text from clients or from the state, without control characters that could move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
