"""The rivals that earlier tables name, so that those that were never best need not be searched again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ampd.errors import UserError
from benchmarks import result_files
from benchmarks.best_layouts.entries import Entry, rivals
from benchmarks.policies.settings import Setting

_COLUMN = "best rival"
_GOODPUT = re.compile(r"\S+( ± \S+)? (?P<label>\S.*)")


def named_rivals(folder: Path, setting: Setting) -> list[Entry]:
    """The rivals that the tables of a folder name as the best ones of any setting, on every layout of this one.

    Raises:
        UserError: the folder's tables name none, or one that does not exist.
    """
    # A label ends with a layout, but for rivals whose workers are all alike.
    named = set(_labels(folder))
    found = [entry for entry in rivals(setting) if {entry.label, entry.contestant.label} & _with_contestants(named)]
    if not named:
        raise UserError(f"--rivals-of: no table in {folder} has a rival")
    return found


def _with_contestants(labels: set[str]) -> set[str]:
    return labels | {label.rpartition(" ")[0] for label in labels}


def _labels(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.csv")):
        for row in result_files.read(path):
            if match := _GOODPUT.fullmatch(row.get(_COLUMN, "")):
                yield match["label"]
