"""The digest of what token ids mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ampd.model_folder import tokenizer_digest
from ampd.tiny_model import tiny_model_path
from benchmarks.faults.weights import other_tokenizer, other_weights


def folder_with(path: Path, text: Any) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(text))
    return path


def test_a_copy_is_equal_and_one_with_other_ids_is_not(tmp_path: Path) -> None:
    model = tiny_model_path()
    copy = shutil.copytree(model, tmp_path / "copy")
    text = json.loads((copy / "tokenizer.json").read_bytes())
    (copy / "tokenizer.json").write_text(json.dumps(text, indent=3, sort_keys=True))
    assert tokenizer_digest(model) == tokenizer_digest(copy) == tokenizer_digest(other_weights(model, tmp_path)) != ""
    assert tokenizer_digest(other_tokenizer(model, tmp_path)) not in ("", tokenizer_digest(model))


def test_added_tokens_count(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"model": {"vocab": {"a": 0, "b": 1}}}
    added = plain | {"added_tokens": [{"content": "<end>", "id": 2}]}
    digests = {tokenizer_digest(folder_with(tmp_path / name, text)) for name, text in (("p", plain), ("a", added))}
    assert len(digests) == 2


def test_a_unigram_model_lists_its_tokens_in_order(tmp_path: Path) -> None:
    unigram = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}
    mapped = {"model": {"vocab": {"b": 1, "a": 0}}}
    digests = {tokenizer_digest(folder_with(tmp_path / name, text)) for name, text in (("u", unigram), ("m", mapped))}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "text",
    [
        None,
        [],
        {},
        {"model": {}},
        {"model": {"vocab": 3}},
        {"model": {"vocab": [1]}},
        {"model": {"vocab": {"a": float("inf")}}},
        {"model": {"vocab": {}}, "added_tokens": 3},
        {"model": {"vocab": {}}, "added_tokens": "ab"},
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_unknown(text: Any, tmp_path: Path) -> None:
    assert tokenizer_digest(folder_with(tmp_path / "broken", text)) == ""
    assert tokenizer_digest(tmp_path) == ""


def test_a_deep_tokenizer_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert tokenizer_digest(tmp_path) == ""
