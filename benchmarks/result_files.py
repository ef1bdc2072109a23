"""Tables of measurements as files: CSV behind lines of `#` that name the commit, the date and the command."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ampd.errors import UserError
from benchmarks.commit import commit


def write(folder: Path, name: str, tables: Mapping[str, str], command: str) -> None:
    """Write Markdown tables, each to the file of `name` and its title."""
    about = [f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}", command]
    for title, table in tables.items():
        (folder / file_name(f"{name} {title}")).write_text(as_csv(table, about), encoding="utf-8")


def file_name(title: str) -> str:
    """The file of a table, as `best-layouts-rounds-engine-pauses.csv`."""
    return re.sub(r"[^a-z0-9.]+", "-", title.lower()).strip("-") + ".csv"


def as_csv(table: str, about: list[str]) -> str:
    """A Markdown table behind the lines that say how it came about; bold and code become plain."""
    head, _, *rows = table.splitlines()
    text = io.StringIO()
    text.writelines(f"# {line}\n" for line in about)
    csv.writer(text, lineterminator="\n").writerows(_cells(line) for line in (head, *rows))
    return text.getvalue()


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "").replace("`", "") for cell in line.strip().strip("|").split("|")]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of such a file, by column.

    Raises:
        UserError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def check_folder(folder: Path | None) -> None:
    """Refuse a place for results before any work is done.

    Raises:
        UserError: it is no folder.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"--write: {folder} is no folder; create it first")
