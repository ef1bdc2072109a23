"""Files of the commands: read and checked as pydantic models, and replaced only as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ampd.errors import UserError

Document = TypeVar("Document", bound=BaseModel)

_LONGEST_QUOTE = 60


def read_document(kind: type[Document], path: Path, what: str, *, quotes_rules: bool = True) -> Document:
    """Read and check a JSON file; errors call it `what`.

    Raises:
        UserError: the file cannot be read or a field is wrong, as one line with the file and the field.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what} ({error.strerror})") from None
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error, quotes_rules=quotes_rules)}") from None


def write_document(text: str, path: Path, what: str) -> None:
    """Write a file, replacing an existing one as a whole; errors call it `what`.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the {what} ({error.strerror})") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a new file in the same folder, which replaces `path` if the block succeeds."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(*paths: Path | None, replaces: bool = False) -> None:
    """Refuse files that cannot be written before any work is done.

    Args:
        replaces: the files are written with `replacing`, which needs the folder's permission in any case. By itself an
            existing file needs only its own.

    Raises:
        UserError: the folder of a file is missing, the file is a folder, or a permission is missing.
    """
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir():
            raise UserError(f"{path}: cannot be written; its folder must exist and it must not be a folder itself")
        if path.exists() and not replaces:
            if not os.access(path, os.W_OK):
                raise UserError(f"{path}: cannot be written; you have no permission to write this file")
        elif reason := _why_nothing_can_be_created_in(path.parent):
            raise UserError(f"{path}: cannot be written; no file can be created in its folder ({reason})")


def _why_nothing_can_be_created_in(folder: Path) -> str:
    """Tried, because permissions do not tell: read-only and special file systems refuse even the owner."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def first_problem(error: ValidationError, *, quotes_rules: bool = True, as_flag: bool = False) -> str:
    """The first problem of a document as one line: the field, the rule, and the given value if it is short.

    Args:
        quotes_rules: quote the value also where one of our own rules failed, whose message may contain it already.
        as_flag: name the field by its flag.
    """
    detail = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in detail["loc"])
    if as_flag and field:
        field = f"--{field.replace('_', '-')}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "json_invalid":
        return f"not a JSON document: {message.removeprefix('Invalid JSON: ')}"
    if detail["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if detail["type"] == "missing":
        return f"{field} is missing"
    given = repr(detail["input"])
    is_quoted = field and len(given) < _LONGEST_QUOTE and (quotes_rules or detail["type"] != "value_error")
    return ": ".join(filter(None, (field, message))) + (f" (given: {given})" if is_quoted else "")
