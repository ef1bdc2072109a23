"""Grammars of SGLang whose cost per token is bounded.

XGrammar keeps every way in which a text fits a grammar. For a regular expression such as `(a{1,100}){1,100}` each token
takes longer than the one before, and the scheduler waits for it with all its rounds. llguidance has limits: it gives a
grammar up that needs too many states or items. The same text meets a limit in all ranks of an engine, so that they
decide alike. Regular expressions, EBNF and JSON schemas with patterns go to llguidance. Other JSON schemas fit a text
in few ways, and stay with XGrammar.

The module is imported in SGLang's processes only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from llguidance.torch import fill_next_token_bitmask
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarRow, InvalidGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend

from workers.engines.sglang_request import TOO_AMBIGUOUS

_PATTERNS = ("pattern", "patternProperties")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\.", re.DOTALL)
_ASCII = 0x80
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's error about a token. Its other errors while it reads tokens are limits."""


class BoundedGrammar(GuidanceGrammar):  # type: ignore[misc]
    """A grammar of llguidance. At a limit its request ends, and the engine goes on."""

    apply_vocab_mask = XGrammarGrammar.apply_vocab_mask
    """Masks of both kinds have the same bits. llguidance's own function is compiled at its first call. That needs a C++
    compiler, and the scheduler stands still for seconds."""

    def __repr__(self) -> str:
        """Without an address: SGLang's check that ranks agree compares the texts of requests."""
        return type(self).__name__

    def accept_token(self, token: int) -> None:
        """Accept a token. Raises `ValueError`, on which SGLang ends the request: a limit was met."""
        self._refuse_at_limit()
        try:
            super().accept_token(token)
        except ValueError:
            self._refuse_at_limit()
            raise

    def _refuse_at_limit(self) -> None:
        if self.ll_matcher.is_error() and _NOT_ALLOWED not in self.ll_matcher.get_error():
            raise ValueError(TOO_AMBIGUOUS) from None

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        """Fill a row of the mask; of a grammar that was given up, with all tokens. `accept_token` refuses the next."""
        if not self.ll_matcher.is_error():
            fill_next_token_bitmask(self.ll_matcher, vocab_mask, idx)
        if self.ll_matcher.is_error():
            vocab_mask[idx].fill_(-1)

    @staticmethod
    def fill_vocab_mask_batched(entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        """Each row by its own grammar: batches have grammars of both kinds."""
        BaseGrammarObject.fill_vocab_mask_batched(entries, vocab_mask)

    def copy(self) -> BoundedGrammar:
        return BoundedGrammar(
            self.llguidance_tokenizer, self.serialized_grammar, ll_matcher=self.ll_matcher.deep_copy()
        )

    def _check_err(self) -> None:
        """As before, without the page about the grammar's state behind the error."""
        if self.ll_matcher.is_error():
            raise ValueError(" ".join(self.ll_matcher.get_error().partition("<state>")[0].split()))


class _Guidance(GuidanceBackend):  # type: ignore[misc]
    """Makes bounded grammars."""

    def _from_serialized(self, serialized_grammar: str) -> BaseGrammarObject:
        try:
            return BoundedGrammar(self.llguidance_tokenizer, serialized_grammar)
        except ValueError as error:
            return InvalidGrammarObject(str(error))


class BoundedBackend(XGrammarGrammarBackend):  # type: ignore[misc]
    """SGLang's backend `xgrammar`, which leaves grammars that can be ambiguous to llguidance."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        model_eos_token_ids: Sequence[int] | None = None,
        any_whitespace: bool = True,
        max_whitespace_cnt: int | None = None,
    ) -> None:
        super().__init__(tokenizer, vocab_size, model_eos_token_ids, any_whitespace, max_whitespace_cnt)
        self._tokenizer = tokenizer
        self._stops = model_eos_token_ids

    @cached_property
    def _guidance(self) -> _Guidance:
        return _Guidance(
            self._tokenizer, any_whitespace=self.any_whitespace, n_vocab=self.vocab_size, eos_token_ids=self._stops
        )

    def dispatch_regex(self, key_string: str) -> BaseGrammarObject:
        """A grammar of a regular expression."""
        return self._guidance.dispatch_regex(key_string)

    def dispatch_ebnf(self, key_string: str) -> BaseGrammarObject:
        """A grammar in EBNF."""
        return self._guidance.dispatch_ebnf(without_u_escapes(key_string))

    def dispatch_json(self, key_string: str) -> BaseGrammarObject:
        """A grammar of a JSON schema."""
        if has_pattern(key_string):
            return self._guidance.dispatch_json(key_string)
        return super().dispatch_json(key_string)

    def dispatch_structural_tag(self, key_string: str) -> BaseGrammarObject:
        """A grammar of tags. llguidance has no such grammars, so that patterns in them are refused."""
        if has_pattern(key_string):
            return InvalidGrammarObject("a structural tag cannot contain patterns, regular expressions or grammars")
        return super().dispatch_structural_tag(key_string)


def has_pattern(text: str) -> bool:
    """Whether a JSON schema, or a structural tag, has parts that can fit a text in many ways."""
    if text == "$$ANY$$":  # SGLang's name of the grammar of all JSON
        return False
    waiting = [json.loads(text)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if any(name in value for name in _PATTERNS) or value.get("type") in ("regex", "grammar"):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def without_u_escapes(grammar: str) -> str:
    r"""EBNF with the characters that `\uXXXX` stands for, because llguidance drops the zeros of such escapes."""

    def plain(escape: re.Match[str]) -> str:
        if escape[1] is None:
            return escape[0]
        code = int(escape[1], 16)
        return f"\\x{code:02x}" if code < _ASCII else chr(code)

    return _ESCAPE.sub(plain, grammar)
