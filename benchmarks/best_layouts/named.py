"""The best rivals that an earlier page names, so that they need not be searched again when only ours has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampd.errors import UserError
from benchmarks.best_layouts.entries import Engine, Entry, rivals
from benchmarks.policies.settings import Setting

_COLUMN = "best rival that pauses"
_GOODPUT = re.compile(r"\S+( ± \S+)? (?P<label>\S.*)")


def named_rivals(page: Path, setting: Setting) -> list[Entry]:
    """The rivals whose engine pauses that the tables of a page name as the best ones of a setting.

    Raises:
        UserError: the page cannot be read, names none, or names one that does not exist.
    """
    try:
        lines = page.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--rivals-of: {page}: cannot be read ({error.strerror})") from None
    labels = dict.fromkeys(_labels(lines, f"{setting.name} {setting.gpu}"))
    by_label = {entry.label: entry for entry in rivals(setting, Engine.PAUSES)}
    if not labels:
        raise UserError(f"--rivals-of: {page} has no row of {setting.name} {setting.gpu} with a rival")
    if unknown := [label for label in labels if label not in by_label]:
        raise UserError(f"--rivals-of: {page} names {unknown[0]!r}; the rivals are {', '.join(by_label)}")
    return [by_label[label] for label in labels]


def _labels(lines: Sequence[str], setting: str) -> Iterator[str]:
    column = None
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "setting":
            column = cells.index(_COLUMN) if _COLUMN in cells else None
        elif cells[0] == setting and column is not None and (match := _GOODPUT.fullmatch(cells[column])):
            yield match["label"]
