"""Files that hold one JSON document of a pydantic model: read, checked and replaced as a whole, errors in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ampd.errors import UserError

Document = TypeVar("Document", bound=BaseModel)


def read_document(kind: type[Document], path: Path, what: str, *, quotes_rules: bool = True) -> Document:
    """Read and check a file; `what` it is called in errors.

    Raises:
        UserError: the file cannot be read or a field is wrong, as one line with the file and the field.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what} ({error.strerror})") from None
    except ValidationError as error:
        raise UserError(f"{path}: {first_line(error, quotes_rules=quotes_rules)}") from None


def write_document(text: str, path: Path, what: str) -> None:
    """Write a file; an existing one is replaced only as a whole.

    Raises:
        UserError: the file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the {what} ({error.strerror})") from None
    finally:
        unfinished.unlink(missing_ok=True)


def first_line(error: ValidationError, *, quotes_rules: bool = True) -> str:
    """The first thing that is wrong with a document: field, rule, and what was given if that is short.

    `quotes_rules`: also where a rule of ours was broken, whose message may say it already.
    """
    detail = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "json_invalid":
        return f"not a JSON document: {message.removeprefix('Invalid JSON: ')}"
    if detail["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if detail["type"] == "missing":
        return f"{field}: missing"
    given = repr(detail["input"])
    is_quoted = field and len(given) < 60 and (quotes_rules or detail["type"] != "value_error")
    return ": ".join(filter(None, (field, message))) + (f" (given: {given})" if is_quoted else "")
