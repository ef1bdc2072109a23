"""Model folders that a modelled engine cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampd.errors import UserError
from workers.engines.modelled_tokens import read_model_folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no readable {name}"),
        ("{", "{name} is not JSON"),
        pytest.param("[" * 100_000, "{name} is not JSON", id="nested"),
    ],
)
def test_a_file_that_is_missing_or_broken_is_one_line(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    for file in {"config.json", "tokenizer.json"} - {name}:
        (tmp_path / file).write_text("{}")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words.format(name=name)) as refusal:
        read_model_folder(tmp_path)
    assert "\n" not in str(refusal.value)
