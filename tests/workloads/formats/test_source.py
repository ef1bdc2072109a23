"""Source files: which are read, and values that do not fit are named with their place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.formats.loader import (
    count_of,
    file_stem,
    read_json,
    read_json_lines,
    rows_by_session,
    seconds_of,
    source_files,
    timestamp_s,
)
from workloads.trace import MAX_TOKENS


def test_a_folder_gives_its_files_with_the_suffix_also_zipped_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    assert [file.name for file in source_files(tmp_path, ".jsonl")] == ["a.jsonl.gz", "b.jsonl", "c.jsonl"]
    assert source_files(tmp_path / "notes.txt", ".jsonl") == [tmp_path / "notes.txt"]
    assert [file_stem(Path(name)) for name in ("x/a.jsonl.gz", "b.json")] == ["a", "b"]
    with pytest.raises(UserError, match=r"holds no file ending in \.csv or \.csv\.gz"):
        source_files(tmp_path, ".csv")


def test_plain_and_zipped_files_read_alike_and_errors_name_the_line(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text('{"a": 1}\n\n{"b": 2}\n')
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, zipped):
        assert list(read_json_lines(file)) == [(f"{file}:1", {"a": 1}), (f"{file}:3", {"b": 2})]
    plain.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: expected an object, found list"):
        list(read_json_lines(plain))
    plain.write_text("[1,\n 2")
    with pytest.raises(UserError, match=r"a\.jsonl:2: not JSON"):
        read_json(plain)


def test_rows_without_tokens_are_left_out_with_a_note(tmp_path: Path) -> None:
    file, notes = tmp_path / "a.jsonl", list[str]()
    rows = [{"id": name, "in": tokens, "out": 1} for name, tokens in (("a", 1), ("b", 2), ("a", 0), ("a", 3))]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = rows_by_session([file], lambda row, _: row["id"], ("in", "out"), notes.append)
    assert {name: [row["in"] for _, row in each] for name, each in found.items()} == {"a": [1, 3], "b": [2]}
    assert notes == [f"{file}:3: no tokens, left out"]


@settings(max_examples=40)
@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3)))
def test_a_count_is_a_whole_number_in_range_or_the_users_error(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= MAX_TOKENS and value == int(value):
        assert count_of({"n": value}, "n", "here") == value
    else:
        with pytest.raises(UserError, match="here: n must be a count"):
            count_of({"n": value}, "n", "here")


def test_times_have_their_unit_and_their_zone() -> None:
    assert seconds_of({"t": 250}, "t", "here", unit_s=1e-3) == 0.25
    assert seconds_of({}, "t", "here") is None
    with pytest.raises(UserError, match="here: t must be a number"):
        seconds_of({"t": True}, "t", "here")
    assert timestamp_s("1970-01-01T00:01:00", "x") == timestamp_s("1970-01-01T01:01:00+01:00", "x") == 60.0
    with pytest.raises(UserError, match="x: 'noon' is not an ISO 8601 time"):
        timestamp_s("noon", "x")
