"""Source files: what they may be packed in, and values that do not fit are named with their place."""

from __future__ import annotations

import gzip
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampd.errors import UserError
from workloads.formats.loader import count_of, file_stem, has, number_of, rows_of, seconds_of, source_files, time_s
from workloads.trace import MAX_TOKENS, load_trace

ROWS = [{"a": 1}, {"b": [2]}]


def _read(path: Path) -> list[dict[str, Any]]:
    return [row.data for row in rows_of(path, path)]


def test_a_folder_gives_its_files_that_may_be_traces_also_packed_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.csv.zst", "picture.png"):
        (tmp_path / name).write_text("")
    assert [file.name for file in source_files(tmp_path)] == ["a.jsonl.gz", "b.jsonl", "c.csv.zst"]
    assert source_files(tmp_path / "picture.png") == [tmp_path / "picture.png"]
    assert [file_stem(name) for name in ("x/a.jsonl.gz", "b.json", "c.csv.zst")] == ["a", "b", "c"]
    with pytest.raises(UserError, match=r"holds no file ending in \.json"):
        source_files(_empty(tmp_path))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('{"a": 1}\n\n{"b": [2]}\n', [1, 3]),
        ("\ufeff" + '{"a": 1}\n{"b": [2]}', [1, 2]),
        ('[\n {"a": 1},\n {"b": [2]}\n]\n', [2, 3]),
        ('[{"a": 1}, {"b": [2]}]', ["1", "1 item 2"]),
        ('{\n "a": 1\n}\n{\n "b": [2]}', [1, 4]),
    ],
)
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_lines_arrays_and_objects_read_alike_in_every_packing(
    tmp_path: Path, text: str, lines: list[Any], packing: str
) -> None:
    path = tmp_path / f"a.json{packing}"
    raw = text.encode()
    if packing == ".zst":
        raw = pytest.importorskip("zstandard").compress(raw)
    path.write_bytes(gzip.compress(raw) if packing == ".gz" else raw)
    assert _read(path) == ROWS
    assert [row.where for row in rows_of(path, path)] == [f"{path}:{line}" for line in lines]


def test_tables_are_rows(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text('a,b\n1,"x\ny"\n,z\n')
    assert _read(table) == [{"a": "1", "b": "x\ny"}, {"b": "z"}]
    table.write_text("a,b\n1,2,3\n")
    with pytest.raises(UserError, match=r"t\.csv:2: has more fields than the first line has names"):
        _read(table)
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    at = datetime(2026, 1, 1, tzinfo=UTC)
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"a": [1, 2], "at": [at, None]}), path)
    assert _read(path) == [{"a": 1, "at": at}, {"a": 2, "at": None}]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"t\.parquet: cannot be read"):
        _read(path)


@pytest.mark.parametrize(("module", "magic"), [("zstandard", b"\x28\xb5\x2f\xfd"), ("pyarrow.parquet", b"PAR1")])
def test_a_missing_package_is_one_line_that_names_it(
    tmp_path: Path, module: str, magic: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(magic)
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(UserError, match=rf"x: this file needs the package {package} \(pip install {package}\)"):
        _read(path)


def test_a_trace_of_ours_may_be_packed_with_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    session = {"session_id": "a", "arrival_s": 0, "rounds": [{"incr_tokens": 5, "output_tokens": 2}]}
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(zstandard.compress(json.dumps(session).encode()))
    assert load_trace(str(path))[0].session_id == "a"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"t\.jsonl\.zst"):
        load_trace(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}\n[2\n', r":2: not JSON \("),
        ('{"a": 1}\n3\n', ":2: expected an object, found int"),
        ('[{"a": 1},\n 2]', ":2: expected an object, found int"),
        ('[{"a": 1},\n {"b": ]', r":2: not JSON \(Expecting value at column 8\)"),
        ('[{"a": 1},\n', ":2: not JSON .the array that begins the file does not end it"),
        ('[{"a": 1}]\n{"b": 2}', ":1: not JSON .the array that begins the file does not end it"),
        ("what", r":1: not JSON \("),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.json" + says):
        _read(path)


@settings(max_examples=40)
@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=3)))
def test_a_count_is_a_whole_number_in_range_or_the_users_error(value: Any) -> None:
    try:
        number = float(value)
    except ValueError:
        number = None
    except OverflowError:
        number = -1.0
    if value == "" or (number is not None and number != number):
        assert count_of({"n": value}, "n", where="here") is None
    elif not isinstance(value, bool) and number is not None and 0 <= number <= MAX_TOKENS and number == int(number):
        assert count_of({"n": value}, "n", where="here") == number
    else:
        with pytest.raises(UserError, match="here: n must be a"):
            count_of({"n": value}, "n", where="here")


def test_times_have_their_unit_and_their_zone() -> None:
    assert seconds_of({"t": 250}, "t", where="here", unit_s=1e-3) == 0.25
    assert seconds_of({}, "t", where="here") is None
    with pytest.raises(UserError, match="here: t must be a number"):
        number_of({"t": True}, "t", where="here")
    for minute in ("1970-01-01T00:01:00", "1970-01-01T01:01:00+01:00", "1970/01/01 00:01:00.000000000 UTC", 60, "60.0"):
        assert time_s({"at": minute}, "at", where="x") == 60.0
    for unit_per_s in (1, 10**3, 10**6, 10**9):
        assert time_s({"at": 1_764_300_000 * unit_per_s}, "at", where="x") == pytest.approx(1_764_300_000)
        assert time_s({"at": str(1_764_300_000 * unit_per_s)}, "at", where="x") == pytest.approx(1_764_300_000)
    with pytest.raises(UserError, match=r"x: at is not an ISO 8601 time .found: 'noon'"):
        time_s({"at": "noon"}, "at", where="x")


def test_signs_name_keys_below_keys_and_values() -> None:
    row = {"a": [{"b": {"gen_ai.x": 1}}, {"kind": "GENERATION"}], "empty": None}
    fitting = ("a", "a/b", "a/b/gen_ai.*", "a/kind=GEN*", "a, a/kind")
    assert [sign for sign in (*fitting, "b", "a/c", "a/kind=SPAN", "a, b", "empty") if has(row, sign)] == list(fitting)
