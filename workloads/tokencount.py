"""Token counts of words: by a tokenizer of the user, or by a documented approximation."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from ampd.errors import UserError
from ampd.tokenizer_errors import as_value_errors

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
