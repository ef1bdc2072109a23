"""The best rivals that earlier tables name, so that they need not be searched again when only ours has changed."""

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
    """The rivals that the tables of a folder name as the best ones of a setting.

    Raises:
        UserError: the folder's tables name none, or one that does not exist.
    """
    labels = dict.fromkeys(_labels(folder, f"{setting.name} {setting.gpu}"))
    by_label = {entry.label: entry for entry in rivals(setting)}
    if not labels:
        raise UserError(f"--rivals-of: no table in {folder} has a row of {setting.name} {setting.gpu} with a rival")
    if unknown := [label for label in labels if label not in by_label]:
        raise UserError(f"--rivals-of: {folder} names {unknown[0]!r}; the rivals are {', '.join(by_label)}")
    return [by_label[label] for label in labels]


def _labels(folder: Path, setting: str) -> Iterator[str]:
    for path in sorted(folder.glob("*.csv")):
        for row in result_files.read(path):
            if row.get("setting") == setting and (match := _GOODPUT.fullmatch(row.get(_COLUMN, ""))):
                yield match["label"]
