"""Token counts of words: the approximation, ranks, and tokenizers that cannot be read."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.formats.loader import RanksCounter, approximate_tokens, load_counter


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("the cat", 2), ("word, word", 3), ("internationalisation", 3), ("123", 3), ("世界", 2), ("{}[]", 1)],
)
def test_the_approximation(text: str, tokens: int) -> None:
    assert approximate_tokens(text) == tokens


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_ranks_of_all_single_bytes_count_bytes(text: str) -> None:
    counter = RanksCounter({bytes([byte]): byte for byte in range(256)})
    assert counter(text) == len(text.encode())
    assert 0 <= approximate_tokens(text) <= max(len(text), 0)


def test_the_lowest_rank_merges_first() -> None:
    counter = RanksCounter({b"bc": 0, b"ab": 1, b"abc": 2})
    assert counter("abc") == 1
    assert RanksCounter({b"bc": 0, b"ab": 1})("abcd") == 3  # a, bc, d


def test_ranks_are_read_and_other_files_refused(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks.tiktoken"
    ranks.write_text("".join(f"{base64.b64encode(token).decode()} {n}\n" for n, token in enumerate([b"ab", b"a"])))
    assert load_counter(ranks)("ab") == 1
    assert load_counter(None) is approximate_tokens
    for content, words in (("YWI=", "is not 'base64-token rank'"), ("!! 3", "is not"), ("\n", "holds no ranks")):
        ranks.write_text(content)
        with pytest.raises(UserError, match=words):
            load_counter(ranks)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_counter(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        load_counter(tmp_path / "missing")
