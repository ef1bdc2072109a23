"""What a coordinator reads from the model's configuration, and a file that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ampd.errors import UserError
from router.settings import context_length, vocabulary_size

Reading = Callable[[Path], int | None]

_ENDLESS = '{"max_position_embeddings": Infinity, "vocab_size": Infinity}'
READINGS: list[Reading] = [lambda folder: context_length(folder, None), vocabulary_size]


def test_the_chosen_context_wins_over_the_model_s(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": 320}))
    assert (context_length(tmp_path, None), context_length(tmp_path, 128)) == (4096, 128)
    assert vocabulary_size(tmp_path) == 320


@pytest.mark.parametrize("reading", READINGS, ids=["context", "vocabulary"])
@pytest.mark.parametrize("text", [None, "{", "[]", _ENDLESS, pytest.param("[" * 100_000, id="nested")])
def test_a_broken_configuration_is_one_line(tmp_path: Path, text: str | None, reading: Reading) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"--model: .*config\.json is not usable") as refusal:
        reading(tmp_path)
    assert "\n" not in str(refusal.value)
