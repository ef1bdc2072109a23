"""Every loader: unknown formats, and files that hold something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ampd.errors import UserError
from workloads.formats import FORMATS, detect
from workloads.formats.loader import has

from .lab import NOTES, load


def test_unknown_formats_and_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown trace format 'nope'; known: .*otel.*toolbench"):
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
        ("mooncake", {"session_id": "a", "input_length": 9.5, "output_length": 5, "hash_ids": [1], "timestamp": 0}),
        ("mooncake", {"session_id": "a", "output_length": 5, "timestamp": 0}),
        ("otel", {"spans": [{"attributes": {"gen_ai.operation.name": "chat"}, "start_time": "noon"}]}),
        ("langfuse", {"type": "GENERATION", "usage": {"input": True}}),
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


def test_a_folder_may_hold_other_files(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("what this is")
    (tmp_path / "a.json").write_text('{"cut": ')
    row = {"input_length": 9, "output_length": 5, "hash_ids": [1], "timestamp": 0}
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n")
    assert detect(tmp_path)[0] == "mooncake"
    assert len(load("mooncake", tmp_path)) == 1
    assert [note.endswith("left out") for note in NOTES] == [True, True]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("mooncake", "mooncake-delta")])
def test_every_sign_is_one_of_its_own_format(name: str) -> None:
    """No format before it in the table has the sign too."""
    for sign in FORMATS[name].alternatives:
        row = _row_with(sign)
        assert has(row, sign), sign
        assert (
            next(other for other, known in FORMATS.items() if any(has(row, each) for each in known.alternatives))
            == name
        )


def _row_with(sign: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for part in sign.split(", "):
        path, _, value = part.partition("=")
        *above, last = path.replace("*", "x").split("/")
        place = row
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value.replace("*", "") or 1
    return row


def test_the_page_has_a_row_for_every_format_in_the_order_of_recognition() -> None:
    page = (Path(__file__).parents[3] / "docs" / "traces.md").read_text()
    rows = [
        line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.split("`")[1] in FORMATS
    ]
    assert rows == list(FORMATS)
