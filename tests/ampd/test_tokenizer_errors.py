"""Errors of the tokenizers library as ValueErrors."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ampd.model_folder import as_value_errors

PANICS = {
    "model": {"type": "BPE", "vocab": {"a": 0, "": 1, "a b": 2}, "merges": ["a b"], "continuing_subword_prefix": "xx"},
}


@pytest.mark.parametrize("text", ["{", "[]", json.dumps(PANICS)])
def test_a_file_that_the_library_refuses_or_fails_at_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"."), as_value_errors():
        Tokenizer.from_file(str(path))


def test_a_panic_is_one_and_an_end_of_the_program_is_none() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ValueError, match="tokenizers failed: range end"), as_value_errors():
        raise panic("range end")
    with pytest.raises(KeyboardInterrupt), as_value_errors():
        raise KeyboardInterrupt
