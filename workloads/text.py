"""Deterministic prompts of a given length, for traces that have token counts but no words."""

from __future__ import annotations

import random

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
