"""What a session's next prompt is made of: the context that the server really produced, cut and extended."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from workloads.trace import Round

# -- deterministic prompts of a given length, for traces that have token counts but no words

_COMMON = (
    "the of and to in is that for it with as was on be at by this from are or an but not which all one "
    "you have had they we can will more when who about out up said what its time than into only other new some could "
    "these two may then do first any my now such like our over man me even most made after also did many before must"
)

WORDS = tuple(_COMMON.split())
"""Short common words: with the space before it each is one token in the BPE vocabularies in use today."""


def synthetic_words(count: int, seed: str) -> str:
    """`count` words, each of one token, the same for the same seed."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


def synthetic_token_ids(count: int, seed: str, first: int, last: int) -> list[int]:
    """`count` token ids between `first` and `last`, both included, the same for the same seed."""
    rng = random.Random(seed)
    width = last - first + 1
    return [first + int(rng.random() * width) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids, both included, that synthetic prompts are drawn from."""

    first: int
    last: int


SAFE_TOKENS = TokenRange(64, 250)
"""Plain byte tokens, never special ones, in the byte-level and SentencePiece vocabularies in use today."""


class History(Protocol):
    """The context of one session during a replay."""

    def prompt(self, item: Round, seed: str) -> dict[str, Any]:
        """Cut the context to what this round keeps, add the round's increment, and return the request's fields."""

    def answered(self, text: str, token_ids: list[int]) -> None:
        """Append what the server generated."""

    @property
    def length_tokens(self) -> int:
        """Length of the context; exact with token ids, else as the trace counts."""


@dataclass(frozen=True, slots=True)
class CommonStart:
    """The first tokens of a session's first prompt, which are the same for all sessions with this seed."""

    tokens: int
    seed: str


class TokenHistory:
    """A context of token ids: the next prompt is an exact extension of what the server computed and generated."""

    def __init__(self, tokens: TokenRange, start: CommonStart | None = None) -> None:
        self._range = tokens
        self._start = start
        self._ids: list[int] = []

    def prompt(self, item: Round, seed: str) -> dict[str, Any]:
        if item.keep_tokens is not None:
            del self._ids[item.keep_tokens :]
        own_tokens = item.incr_tokens
        if self._start is not None:
            self._ids += self._drawn(self._start.tokens, self._start.seed)
            own_tokens -= self._start.tokens
            self._start = None
        self._ids += self._drawn(own_tokens, seed)
        return {"prompt": list(self._ids)}

    def answered(self, text: str, token_ids: list[int]) -> None:
        del text
        self._ids += token_ids

    @property
    def length_tokens(self) -> int:
        """Exact."""
        return len(self._ids)

    def _drawn(self, tokens: int, seed: str) -> list[int]:
        return synthetic_token_ids(tokens, seed, self._range.first, self._range.last)


@dataclass(slots=True)
class _Piece:
    role: str
    text: str
    tokens: int


@dataclass(slots=True)
class WordHistory:
    """A context of words, as chat messages or as one text; a cut goes through a piece in proportion to its words.

    Attributes:
        start: becomes the system message. Real words of the trace have their own.
    """

    chat: bool
    start: CommonStart | None = None
    _pieces: list[_Piece] = field(default_factory=list)
    _expected_output_tokens: int = 0

    def prompt(self, item: Round, seed: str) -> dict[str, Any]:
        if item.keep_tokens is not None:
            self._cut(item.keep_tokens)
        own_tokens = item.incr_tokens
        if self.start is not None and item.text is None and self.start.tokens < own_tokens:
            common = synthetic_words(self.start.tokens, self.start.seed)
            self._pieces.append(_Piece("system", common, self.start.tokens))
            own_tokens -= self.start.tokens
        self.start = None
        words = item.text if item.text is not None else synthetic_words(own_tokens, seed)
        self._pieces.append(_Piece("user", words, own_tokens))
        self._expected_output_tokens = item.output_tokens
        if not self.chat:
            return {"prompt": "".join(piece.text for piece in self._pieces)}
        return {"messages": [{"role": piece.role, "content": piece.text} for piece in self._pieces]}

    def answered(self, text: str, token_ids: list[int]) -> None:
        del token_ids
        self._pieces.append(_Piece("assistant", text, self._expected_output_tokens))

    @property
    def length_tokens(self) -> int:
        """The sum of the trace's counts."""
        return sum(piece.tokens for piece in self._pieces)

    def _cut(self, keep_tokens: int) -> None:
        kept: list[_Piece] = []
        left = keep_tokens
        for piece in self._pieces:
            if left <= 0:
                break
            if piece.tokens > left:
                text = piece.text[: len(piece.text) * left // piece.tokens]
                # A cut through a word would make tokens that neither side has.
                space = text.rfind(" ")
                piece = _Piece(piece.role, text[:space] if space > 0 else text, left)
            kept.append(piece)
            left -= piece.tokens
        self._pieces = kept
