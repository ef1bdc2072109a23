"""Every loader: unknown formats, and files that hold something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from workloads.formats import FORMATS

from .lab import load


def test_unknown_formats_and_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown trace format 'nope'; known: .*toolbench.*trail"):
        load("nope", tmp_path)
    with pytest.raises(UserError, match="no such file"):
        load("trail", tmp_path / "missing")


@pytest.mark.parametrize("name", FORMATS)
def test_garbage_is_one_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    for suffix, content in (
        (".json", "{}\n"),
        (".jsonl", '{"a": 1}\n'),
        (".csv", "a,b\n"),
        (".json", "[3]"),
        (".jsonl", "?"),
    ):
        path = tmp_path / f"garbage{suffix}"
        path.write_text(content)
        message = _refusal(name, path)
        assert message is None or (str(path) in message and "\n" not in message)


def _refusal(name: str, path: Path) -> str | None:
    """Why the loader refused the file; None if it found nothing in it."""
    try:
        loaded = load(name, path)
    except UserError as error:
        return str(error)
    return None if not loaded else f"{path} was read as {loaded}\n"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mooncake", {"session_id": "", "input_length": 9, "output_length": 5, "hash_ids": [1], "timestamp": 0}),
        ("mooncake", {"session_id": "a", "input_length": 9, "output_length": 5, "hash_ids": [1], "timestamp": -1}),
        ("mooncake", {"session_id": "a", "input_length": 9, "output_length": 5, "hash_ids": [1], "timestamp": 10**400}),
        ("kv-cache-tester", {"id": "x", "block_size": [9], "requests": []}),
    ],
)
def test_a_value_of_another_form_is_one_line(name: str, row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "source.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError) as error:
        load(name, path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
