"""Token counts of words: the approximation, and tokenizers that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.formats.loader import approximate_tokens, load_counter


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("", 0), ("the cat", 2), ("word, word", 3), ("internationalisation", 3), ("123", 3), ("世界", 2), ("{}[]", 1)],
)
def test_the_approximation(text: str, tokens: int) -> None:
    assert approximate_tokens(text) == tokens


@given(st.text(max_size=40))
def test_the_approximation_counts_no_more_tokens_than_letters(text: str) -> None:
    assert 0 <= approximate_tokens(text) <= len(text)


def test_other_files_are_refused(tmp_path: Path) -> None:
    assert load_counter(None) is approximate_tokens
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_counter(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        load_counter(tmp_path / "missing")
