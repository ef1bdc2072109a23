"""The tokens that a round must have, known before it runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from workers.engines.modelled_tokens import ContextHash, TokenSource, read_model_folder

_LOWEST, _HIGHEST = 20, 290
"""Range of the token ids of prompts: plain words and syllables of the tiny model."""


class Expected(Protocol):
    """The right answers, as far as they are known."""

    def output(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens that follow `prompt`."""
        ...

    def text(self, prompt: Sequence[int], count: int) -> str | None:
        """The right answer as text, as a client gets it; None: it is not known, and any text counts as right."""
        ...


class AnyText:
    """Any text is right."""

    def output(self, _prompt: Sequence[int], count: int) -> list[int]:
        """Tokens that stand for the answer in the context of the next round."""
        return [_LOWEST] * count

    def text(self, _prompt: Sequence[int], _count: int) -> None:
        """Nothing is known."""
        return


class ExpectedTokens:
    """The modelled engine's tokens, which are a function of the context alone."""

    def __init__(self, model: Path) -> None:
        self._source = TokenSource(read_model_folder(model))
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def output(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens that follow `prompt`."""
        context, tokens = ContextHash(prompt), []
        for _ in range(count):
            token_id = self._source.choose(context, 0, None, 0).token_id
            context.push(token_id)
            tokens.append(token_id)
        return tokens

    def text(self, prompt: Sequence[int], count: int) -> str:
        """The right answer as text, as a client gets it."""
        return str(self._tokenizer.decode(self.output(prompt, count)))


@cache
def expected_tokens(model: Path) -> ExpectedTokens:
    """Of a model folder; the folder is read once."""
    return ExpectedTokens(model)


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that no other session has at the start of its prompt."""
    return [rng.randint(_LOWEST, _HIGHEST) for _ in range(tokens)]
