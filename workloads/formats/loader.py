"""What the formats share: files of any packing as rows, checked values that name their place, and counts of words."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ampd.errors import UserError
from ampd.model_folder import as_value_errors
from workloads.trace import (
    MAX_TOKENS,
    UNPACKED_CHARACTERS,
    beginning_of,
    numbered_lines,
    optional_package,
    packing_of,
    parse_json,
)

_PACKINGS = (".gz", ".zst")
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".traj", ".parquet", ".log", ".txt", ".out")
_LOG = re.compile(r"Received request |Generated response |Receive: obj=|Finish: obj=|\"event\": \"request\.")
_LOG_LINES = 2000
"""A server writes many other lines before it logs its first request."""
_ARRAY = re.compile(r"\s*\[\s*(?=[\[{\"\]])")
_ENVELOPES = ("data", "rows", "records", "logs", "results")
_PEEKED_CHARACTERS = 1 << 20
_BETWEEN = re.compile(r"\s*,?\s*")


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a source.

    Attributes:
        where: file and line, for messages.
        name: the file's path below the source, or its name.
    """

    where: str
    name: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a source.

    Attributes:
        note: called with one line for each kind of input that is assumed.
        left: why parts are left out, and where.
    """

    rows: Iterable[Row]
    note: Callable[[str], None]
    left: dict[str, list[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def leave_out(self, why: str, where: str) -> None:
        self.left.setdefault(why, []).append(where)


def source_files(path: Path) -> list[Path]:
    """The file itself, or all files below a folder that may hold a trace, sorted.

    Raises:
        UserError: a folder without such a file.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and _unpacked(file).endswith(_SUFFIXES))
    if not found:
        raise UserError(f"{path}: holds no file ending in {', '.join(_SUFFIXES)} (or these with .gz or .zst)")
    return found


def file_stem(name: str) -> str:
    """A file's name without its packing and without its last suffix."""
    return Path(_unpacked(Path(name))).stem


def rows_of(file: Path, source: Path) -> Iterator[Row]:
    """The rows of a file: Parquet, CSV, JSON lines, arrays or single objects in JSON, or the lines of a server's log.

    Raises:
        UserError: the file is none of them, or is damaged; the message names the line.
    """
    name = str(file.relative_to(source)) if source.is_dir() else file.name
    for where, value in _values(file):
        yield Row(where, name, _object(value, where))


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    if packing_of(file) == ".parquet":
        return _parquet(file)
    first_line = beginning_of(file, _PEEKED_CHARACTERS).lstrip().partition("\n")[0]
    if _unpacked(file).endswith(".csv"):
        return _csv(file)
    if first_line.startswith("{") or _ARRAY.match(first_line + "]"):
        return _json(file, first_line)
    if _is_log(file):
        return ((f"{file}:{number}", {"log": line.rstrip("\n")}) for number, line in numbered_lines(file))
    if "," in first_line and not first_line.startswith("["):
        return _csv(file)
    return _json(file, first_line)


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    parquet = optional_package("pyarrow.parquet", file)
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for value in batch.to_pylist():
                number += 1
                yield f"{file}: row {number}", value
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise UserError(f"{file}: cannot be read ({' '.join(str(error).split())})") from None


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    lines = (line for _, line in numbered_lines(file))
    reader = csv.DictReader(lines)
    try:
        for row in reader:
            if None in row:
                raise UserError(f"{file}:{reader.line_num}: has more fields than the first line has names")
            yield f"{file}:{reader.line_num}", {key: value for key, value in row.items() if value not in (None, "")}
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num}: not CSV ({error})") from None


def _json(file: Path, first_line: str) -> Iterator[tuple[str, Any]]:
    try:
        is_lines = isinstance(json.loads(first_line), dict)
    except (ValueError, RecursionError):
        is_lines = False
    if not is_lines:
        yield from _json_document(file)
        return
    for number, line in numbered_lines(file):
        where = f"{file}:{number}"
        for item, inner in enumerate(_unwrapped(parse_json(line, where)), start=1):
            yield where + (f" item {item}" if item > 1 else ""), inner


def _json_document(file: Path) -> Iterator[tuple[str, Any]]:
    """The items of an array, or the objects of a file that writes each over several lines."""
    text = beginning_of(file, UNPACKED_CHARACTERS + 1)
    if len(text) > UNPACKED_CHARACTERS:
        raise UserError(f"{file}: holds more than {UNPACKED_CHARACTERS} characters; split it, or use JSON lines")
    opening = re.match(r"\s*\[", text)
    at, line, decode = opening.end() if opening else 0, 1, json.JSONDecoder().raw_decode
    counted = line_before = item = 0
    while True:
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if at >= len(text) or (opening and text[at] == "]"):
            break
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError):
            raise UserError(f"{file}:{line}: a number has too many digits, or brackets are too deeply nested") from None
        for inner in _unwrapped(value):
            item += 1
            yield f"{file}:{line}" + (f" item {item}" if line == line_before else ""), inner
            line_before = line
    line += text.count("\n", counted, at)
    if opening and (at >= len(text) or text[at + 1 :].strip()):
        raise UserError(f"{file}:{line}: not JSON (the array that begins the file does not end it)")


def _unwrapped(value: Any) -> list[Any]:
    """The rows of a page of an API or of an export, which has them below one of a few keys."""
    if not isinstance(value, dict):
        return [value]
    wrapped: list[Any] = next((value[key] for key in _ENVELOPES if isinstance(value.get(key), list)), [])
    return wrapped if wrapped and all(isinstance(item, dict) for item in wrapped) else [value]


def _is_log(file: Path) -> bool:
    lines = (line for number, line in numbered_lines(file) if number <= _LOG_LINES)
    return any(_LOG.search(line) for line in lines)


def _unpacked(file: Path) -> str:
    return file.name.removesuffix(file.suffix) if file.suffix in _PACKINGS else file.name


def _object(value: Any, where: str) -> dict[str, Any]:
    """An array of conversations that are bare lists of messages has lists as its items."""
    return {"messages": value} if isinstance(value, list) else as_object(value, where)


# -- checked values


def as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where}: expected a list, found {type(value).__name__}")
    return value


def first_of(record: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first of these keys that has one."""
    return next((record[key] for key in keys if record.get(key) not in (None, "")), None)


def text_of(record: Mapping[str, Any], *keys: str) -> str | None:
    value = first_of(record, *keys)
    return None if value is None else str(value)


def parsed(value: Any) -> Any:
    """What a text of JSON holds, as columns of tables and attributes of spans have it; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def part_of(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object below a record; empty: there is none."""
    value = parsed(record.get(key))
    return value if isinstance(value, dict) else {}


def number_of(record: Mapping[str, Any], *keys: str, where: str) -> float | None:
    """A number, also as the text of one; None: there is none, or it is no number (NaN)."""
    value = first_of(record, *keys)
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if value is None or (isinstance(value, float) and value != value):
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not isfinite(value))
    ):
        raise UserError(f"{where}: {_present(record, keys)} must be a number (found: {value!r})")
    return value


def count_of(record: Mapping[str, Any], *keys: str, where: str) -> int | None:
    """A count, also as a float or a text that is whole; None: there is none."""
    value = number_of(record, *keys, where=where)
    if value is None:
        return None
    if not 0 <= value <= MAX_TOKENS or value != int(value):
        raise UserError(f"{where}: {_present(record, keys)} must be a count from 0 to {MAX_TOKENS} (found: {value!r})")
    return int(value)


def seconds_of(record: Mapping[str, Any], *keys: str, where: str, unit_s: float = 1.0) -> float | None:
    """A duration or a time of the trace's own clock, from a number in units of `unit_s`."""
    value = number_of(record, *keys, where=where)
    return None if value is None else float(value) * unit_s


_EPOCH_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""A number of at least this is a time in this unit: a smaller unit would put it far from our days."""
_ZONE_NAME = re.compile(r"\s*(UTC|GMT|Z)$", re.IGNORECASE)


def time_s(record: Mapping[str, Any], *keys: str, where: str) -> float | None:
    """A time as seconds since 1970: ISO 8601 with any fraction and zone (none: UTC), or a number in s, ms, us or ns."""
    value = first_of(record, *keys)
    if isinstance(value, str) and not re.fullmatch(r"\s*[\d.]+\s*", value):
        try:
            value = datetime.fromisoformat(_ZONE_NAME.sub("+00:00", value.strip()).replace("/", "-"))
        except ValueError:
            raise UserError(f"{where}: {_present(record, keys)} is not an ISO 8601 time (found: {value!r})") from None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    number = number_of(record, *keys, where=where)
    return None if number is None else number * next((unit for least, unit in _EPOCH_UNITS if number >= least), 1.0)


def _present(record: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return next(key for key in keys if record.get(key) not in (None, ""))


def has(record: Any, sign: str) -> bool:
    """Whether a row has what a sign says: `key, key/below, key=value`, where keys and values may have stars.

    Of lists, some item has it.
    """
    return all(_has(record, *part.partition("=")[::2]) for part in sign.split(", "))


def _has(record: Any, path: str, wanted: str) -> bool:
    if isinstance(record, list):
        return any(_has(item, path, wanted) for item in record[:50])
    if not path:
        return record is not None and (not wanted or (isinstance(record, str) and fnmatchcase(record, wanted)))
    if not isinstance(record, dict):
        return False
    key, _, below = path.partition("/")
    return any(
        _has(value, below, wanted) for name, value in record.items() if name == key or fnmatchcase(str(name), key)
    )


# -- token counts of words: by a tokenizer of the user, or by a documented approximation

TokenCounter = Callable[[str], int]
"""Text -> number of tokens (0 for an empty text)."""

# The word splitting of GPT-style BPE vocabularies, as far as `re` supports it.
_PIECES = re.compile(
    r"(?i:'(?:[sdmt]|ll|ve|re))|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_PER_TOKEN = 7


def load_counter(path: Path | None) -> TokenCounter:
    """A counter from a `tokenizer.json` (or the folder of a model), None approximates.

    Raises:
        UserError: the file is missing or has neither format.
    """
    if path is None:
        return approximate_tokens
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--tokenizer {path}: no such file; give a tokenizer.json or a model folder")
    return _huggingface_counter(file)


def approximate_tokens(text: str) -> int:
    """Approximate number of tokens of `text` in a BPE vocabulary of 100k or more entries.

    Words up to seven letters and runs of punctuation count as one token, longer words as one per seven letters begun,
    digits and characters outside the Latin alphabets as one each. `docs/traces.md` has a measurement against Qwen's
    tokenizer: a few per cent off on English prose and JSON, about a third too many on Chinese.
    """
    return sum(_piece_tokens(piece.group()) for piece in _PIECES.finditer(text))


def _piece_tokens(piece: str) -> int:
    word = piece.strip()
    if not word or not word[-1].isalpha():
        return 1
    foreign = sum(character > "\u024f" for character in word)
    latin = len(word) - foreign
    return foreign + -(-latin // _LETTERS_PER_TOKEN)


def _huggingface_counter(file: Path) -> TokenCounter:
    try:
        with as_value_errors():
            tokenizer = Tokenizer.from_file(str(file))
    except ValueError as error:
        raise UserError(f"--tokenizer {file}: is not a tokenizer.json ({error})") from None

    def count(text: str) -> int:
        try:
            with as_value_errors():
                return len(tokenizer.encode(text, add_special_tokens=False).ids)
        except ValueError as error:  # a vocabulary that lacks parts of the text
            raise UserError(f"--tokenizer {file}: cannot count a text ({error})") from None

    return count
