"""The tokens of the modelled engine: a fixed function of the context, so that every route gives the same ones."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ampd.errors import UserError
from ampd.model_folder import model_digest, tokenizer_digest
from ampd.perf.model_shape import read_model_shape
from ampd.sampling_limits import vocabulary_tokens

_SPACE_MARKS = ("\u0120", "\u2581")
"""How byte-level and sentencepiece vocabularies write a leading space."""


_MOST_TOKENS = 1 << 32
"""Contexts have 32 bits per token."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the modelled engine takes from a model folder.

    Attributes:
        printable: ids of tokens that decode to plain words, with their text.
        eos_token_ids: from the model's configuration.
        digest: of the folder's contents.
        tokenizer: digest of what the token ids mean.
    """

    printable: tuple[tuple[int, str], ...]
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    kv_bytes_per_token: int
    vocabulary_size: int | None = None
    digest: str = ""
    tokenizer: str = ""


def read_model_folder(folder: Path) -> ModelFacts:
    """Read `config.json` and `tokenizer.json` of a model folder.

    Raises:
        UserError: one of them is missing or unusable, or the model's layers are of an unknown kind.
    """
    config = _read_json(folder, "config.json")
    tokenizer = _read_json(folder, "tokenizer.json")
    try:
        config = config.get("text_config") or config
        printable = _printable(tokenizer)
        has_long_values = "float32" in str(config.get("dtype") or config.get("torch_dtype"))
        shape = read_model_shape(folder, 32 if has_long_values else 0)
        facts = ModelFacts(
            printable=printable,
            eos_token_ids=tuple(_as_list(config.get("eos_token_id"))),
            max_context_tokens=shape.max_context_tokens,
            kv_bytes_per_token=round(shape.kv_bytes_per_token),
            vocabulary_size=vocabulary_tokens(config),
            digest=model_digest(folder),
            tokenizer=tokenizer_digest(folder),
        )
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"model folder {folder}: config.json or tokenizer.json is not usable ({error!r})") from None
    sizes = (facts.max_context_tokens, facts.kv_bytes_per_token, facts.vocabulary_size)
    if any(size is not None and size < 1 for size in sizes):
        raise UserError(f"model folder {folder}: config.json has a size that is not positive")
    if not printable:
        raise UserError(f"model folder {folder}: tokenizer.json has no vocabulary of words")
    return facts


@dataclass(frozen=True, slots=True)
class Token:
    """One made-up token with its made-up log-probabilities."""

    token_id: int
    log_prob: float
    top: tuple[dict[str, Any], ...]


class TokenSource:
    """Makes tokens from contexts.

    Args:
        facts: with the tokens to choose from.
        eos_every: mean number of tokens between two ends of sequence; 0: none.

    Attributes:
        eos_token_ids: which tokens are ends of sequence.
    """

    def __init__(self, facts: ModelFacts, eos_every: int = 0) -> None:
        self.eos_token_ids = facts.eos_token_ids
        self._printable = facts.printable
        self._eos_every = eos_every

    def choose(
        self, state: ContextHash, index: int, eos_token_id: int | None, top_logprobs: int, planned: int | None = None
    ) -> Token:
        """The token that follows a context in choice `index`.

        Args:
            eos_token_id: None: it is never an end of sequence.
            planned: the token that it must be; None: it is made up.
        """
        value = state.value(index)
        size = len(self._printable)
        token_id = self._printable[value % size][0]
        if planned is not None:
            token_id = planned
        elif eos_token_id is not None and self._eos_every and (value >> 24) % self._eos_every == 0:
            token_id = eos_token_id
        log_prob = -(1 + (value >> 40) % 1000) / 1000
        return Token(token_id, log_prob, self._top(value, token_id, log_prob, top_logprobs))

    def _top(self, value: int, token_id: int, log_prob: float, count: int) -> tuple[dict[str, Any], ...]:
        if count <= 0:
            return ()
        chosen = self._printable[value % len(self._printable)]
        texts = [(token_id, chosen[1] if chosen[0] == token_id else None)]
        texts += [self._printable[(value + step) % len(self._printable)] for step in range(1, count)]
        return tuple(
            {"rank": rank, "token_id": top_id, "token": text, "logprob": log_prob - math.log(rank)}
            for rank, (top_id, text) in enumerate(texts, start=1)
        )


class ContextHash:
    """A hash of all tokens of a context that grows in constant time per token."""

    __slots__ = ("_hash",)

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._hash = blake2b(array("I", token_ids).tobytes(), digest_size=8)

    def push(self, token_id: int) -> None:
        """Add the next token of the context."""
        self._hash.update(token_id.to_bytes(4, "little"))

    def value(self, index: int) -> int:
        """64 bits of the context; other choices than the first have their own."""
        state = self._hash.copy()
        if index:
            state.update(b"choice" + index.to_bytes(4, "little"))
        return int.from_bytes(state.digest(), "little")

    def copy(self) -> ContextHash:
        """An independent hash of the same context."""
        twin = ContextHash.__new__(ContextHash)
        twin._hash = self._hash.copy()
        return twin


def _read_json(folder: Path, name: str) -> Any:
    path = folder / name
    try:
        return json.loads(path.read_bytes())
    except OSError:
        raise UserError(f"model folder {folder} has no readable {name}; give a folder in Hugging Face layout") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _printable(tokenizer: Any) -> tuple[tuple[int, str], ...]:
    vocab = tokenizer["model"]["vocab"]
    pairs = list(vocab.items()) if isinstance(vocab, dict) else [(entry[0], at) for at, entry in enumerate(vocab)]
    special = {entry["id"] for entry in tokenizer.get("added_tokens", ())}
    if any(type(token_id) is not int or not 0 <= token_id < _MOST_TOKENS for _, token_id in pairs):
        raise ValueError("a token id that is none")
    words = [(token_id, text) for piece, token_id in pairs if token_id not in special and (text := _word(piece))]
    return tuple(sorted(words))


def _word(piece: str) -> str | None:
    """The text of a vocabulary entry if it is a plain word, with or without a leading space."""
    for mark in _SPACE_MARKS:
        if piece.startswith(mark):
            return " " + piece[1:] if _plain(piece[1:]) else None
    return piece if _plain(piece) else None


def _plain(text: str) -> bool:
    return text.isascii() and text.isalpha()


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token_id) for token_id in value] if isinstance(value, list) else [int(value)]
