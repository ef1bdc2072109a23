"""How the trace formats are loaded: token counts of words, checked reading of files, the rounds of recorded calls."""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ampd.errors import UserError
from ampd.model_folder import as_value_errors
from workloads.trace import MAX_TOKENS, UNPACKED_CHARACTERS, Round, Session, numbered_lines, open_text, parse_json

TokenCounter = Callable[[str], int]
"""Text -> number of tokens (0 for an empty text)."""

# The word splitting of GPT-style BPE vocabularies, as far as `re` supports it.
_PIECES = re.compile(
    r"(?i:'(?:[sdmt]|ll|ve|re))|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_PER_TOKEN = 7


def load_counter(path: Path | None) -> TokenCounter:
    """A counter from a `tokenizer.json` (or the folder of a model), or from tiktoken-style ranks; None approximates.

    Raises:
        UserError: the file is missing or has neither format.
    """
    if path is None:
        return approximate_tokens
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--tokenizer {path}: no such file; give a tokenizer.json, a model folder or a ranks file")
    if file.suffix == ".json":
        return _huggingface_counter(file)
    return RanksCounter(_read_ranks(file))


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


class RanksCounter:
    """Byte-pair counting from tiktoken-style ranks: merge the lowest-ranked neighbours until none is left."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self._ranks = ranks
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return sum(self._piece(piece.group()) for piece in _PIECES.finditer(text))

    def _piece(self, piece: str) -> int:
        count = self._known.get(piece)
        if count is None:
            count = self._merge(piece.encode())
            self._known[piece] = count
        return count

    def _merge(self, raw: bytes) -> int:
        if raw in self._ranks:
            return 1
        parts = [raw[index : index + 1] for index in range(len(raw))]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda at: self._ranks.get(parts[at] + parts[at + 1], _NO_RANK))
            if parts[best] + parts[best + 1] not in self._ranks:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return len(parts)


_NO_RANK = 1 << 62


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"--tokenizer {file}:{number}: is not 'base64-token rank'") from None
    if not ranks:
        raise UserError(f"--tokenizer {file}: holds no ranks")
    return ranks


# -- How the trace formats are loaded: checked reading of their files, the rounds of recorded calls, and the registry

# -- reading source files: a file or a folder, plain or gzipped, with errors that name the place

Row = tuple[str, dict[str, Any]]
"""(place, object) of a line of JSON."""


def source_files(path: Path, *suffixes: str) -> list[Path]:
    """The file itself, or all files below a folder with one of the suffixes (also with `.gz`), sorted.

    Raises:
        UserError: a folder without such a file.
    """
    if path.is_file():
        return [path]
    wanted = tuple(suffixes) + tuple(f"{suffix}.gz" for suffix in suffixes)
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(wanted))
    if not found:
        raise UserError(f"{path}: holds no file ending in {' or '.join(wanted)}")
    return found


def only_file(path: Path, *suffixes: str) -> Path:
    """The file itself, or the only one below a folder with one of the suffixes (also with `.gz`).

    For formats in which each file is a trace with times or names of its own.

    Raises:
        UserError: a folder without such a file, or with several.
    """
    found = source_files(path, *suffixes)
    if len(found) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in found[:5])
        raise UserError(f"{path}: holds {len(found)} traces; convert one at a time: {names}")
    return found[0]


def file_stem(file: Path) -> str:
    """A file's name without `.gz` and without its last suffix."""
    return Path(file.name.removesuffix(".gz")).stem


def read_json(file: Path) -> Any:
    """A whole file as one JSON value."""
    with open_text(file) as stream:
        try:
            text = stream.read(UNPACKED_CHARACTERS + 1)
            if len(text) > UNPACKED_CHARACTERS:
                raise UserError(f"{file}: holds more than {UNPACKED_CHARACTERS} characters; split it")
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}:{error.lineno}: not JSON ({error.msg})") from None
        except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None
        except (ValueError, RecursionError):
            raise UserError(f"{file}: a number has too many digits, or brackets are nested too deeply") from None


def read_json_lines(file: Path) -> Iterator[Row]:
    """Every line that is not blank."""
    for number, line in numbered_lines(file):
        where = f"{file}:{number}"
        yield where, as_object(parse_json(line, where), where)


def rows_by_session(
    files: Iterable[Path],
    name_of: Callable[[dict[str, Any], str], str],
    counts: tuple[str, str],
    note: Callable[[str], None],
) -> dict[str, list[Row]]:
    """The rows of JSON-lines files by session, in the order of the files. Rows without tokens are left out.

    Args:
        name_of: gives the session of a row at a place.
        counts: keys of the prompt's and of the output's tokens.
        note: called with one line for each row that is left out.
    """
    by_session: dict[str, list[Row]] = {}
    for file in files:
        for where, row in read_json_lines(file):
            if all(count_of(row, key, where) for key in counts):
                by_session.setdefault(name_of(row, where), []).append((where, row))
            else:
                note(f"{where}: no tokens, left out")
    return by_session


def as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where}: expected a list, found {type(value).__name__}")
    return value


def count_of(record: dict[str, Any], key: str, where: str) -> int:
    """A count that must be there."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = -1
    if not 0 <= value <= MAX_TOKENS or value != int(value):
        raise UserError(f"{where}: {key} must be a count from 0 to {MAX_TOKENS} (found: {record.get(key)!r})")
    return int(value)


def seconds_of(record: dict[str, Any], key: str, where: str, *, unit_s: float = 1.0) -> float | None:
    """A duration or time in seconds, from a number in units of `unit_s`; None if it is missing."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: {key} must be a number (found: {value!r})")
    return float(value) * unit_s


def timestamp_s(value: Any, where: str) -> float:
    """An ISO 8601 time as seconds since 1970; a time without a zone counts as UTC."""
    try:
        moment = datetime.fromisoformat(str(value).strip())
    except ValueError:
        raise UserError(f"{where}: {value!r} is not an ISO 8601 time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


# -- turns the prompts of successive model calls into the rounds of a session: kept context and new tokens


@dataclass(frozen=True, slots=True)
class Call:
    """One model call as recorded by a source.

    Attributes:
        prompt_tokens: the whole prompt.
        output_tokens: generated tokens.
        gap_s: seconds between the end of the previous call and this one.
        hashes: of the prompt's blocks of `block_tokens` tokens; empty if the source has none.
        shared_tokens: without hashes, the tokens of the previous PROMPT that are a prefix of this one; None: unknown.
        text: the new words of this prompt.
    """

    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    hashes: Sequence[int] = ()
    block_tokens: int = 0
    shared_tokens: int | None = None
    text: str | None = None


def rounds_of(calls: Sequence[Call], where: str) -> tuple[Round, ...]:
    """Rounds of one session.

    A prompt that is longer than the previous prompt with its output, and is not known to diverge from it, extends it.
    The agent rewrote any other prompt, which keeps only tokens that are known to be shared. These are the tokens that
    the source records (at most the previous prompt, because a dropped output is not shared). If it records none, they
    are the whole previous prompt if this one is longer, else none. At least one token of a prompt is new.

    Raises:
        UserError: a call without prompt or output tokens.
    """
    rounds: list[Round] = []
    previous: Call | None = None
    for index, call in enumerate(calls):
        if call.prompt_tokens < 1 or call.output_tokens < 1:
            raise UserError(f"{where}: call {index} has no prompt or no output tokens")
        keep = _keep_tokens(previous, call)
        base = previous.prompt_tokens + previous.output_tokens if keep is None and previous else keep or 0
        rounds.append(
            Round(
                incr_tokens=call.prompt_tokens - base,
                output_tokens=call.output_tokens,
                tool_s=round(max(call.gap_s, 0.0), 6) if previous else 0.0,
                keep_tokens=keep,
                text=call.text,
            )
        )
        previous = call
    return tuple(rounds)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of equal items at the beginning of two sequences."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(left), len(right)))


def _keep_tokens(previous: Call | None, call: Call) -> int | None:
    if previous is None:
        return None
    shared = _shared_tokens(previous, call)
    diverges = shared is not None and shared < previous.prompt_tokens
    if call.prompt_tokens > previous.prompt_tokens + previous.output_tokens and not diverges:
        return None
    if shared is None:
        shared = previous.prompt_tokens if call.prompt_tokens > previous.prompt_tokens else 0
    return max(0, min(shared, previous.prompt_tokens, call.prompt_tokens - 1))


def _shared_tokens(previous: Call, call: Call) -> int | None:
    """Tokens of the previous prompt that this one shares, by the block hashes if both have them.

    Only full blocks can be compared. If this prompt shares all full blocks of the previous one, it shares the whole
    prompt, because the last, partial block changes its hash as soon as it fills.
    """
    if not (previous.hashes and call.hashes and call.block_tokens):
        return call.shared_tokens
    common = common_prefix(previous.hashes, call.hashes)
    full_blocks = previous.prompt_tokens // call.block_tokens
    return previous.prompt_tokens if common >= full_blocks else common * call.block_tokens


# -- what the loaders of all formats have in common


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a loader.

    Attributes:
        count_tokens: counts the tokens of words where the source records none.
        with_text: keep the words of every increment, for replays with real words.
        note: called with one line for each part of the input that is left out.
    """

    count_tokens: TokenCounter = approximate_tokens
    with_text: bool = False
    note: Callable[[str], None] = _to_stderr


Loader = Callable[[Path, LoadOptions], Iterator[Session]]
"""(file or folder, options) -> sessions. Raises `UserError` for malformed input, with file and place."""
