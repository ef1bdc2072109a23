"""The file of a routing table: rows in any order, and wrong files in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ampd_rivals.ppd.table_file import parse_table

from ampd.errors import UserError
from ampd.policies.registry import create, create_named

from .table_lab import document

ROWS = document()["rows"]


def test_rows_may_come_in_any_order() -> None:
    given_rows = document((2, 0, 0, 0))
    turned = given_rows | {"rows": given_rows["rows"][::-1]}
    assert parse_table(turned).routes == parse_table(given_rows).routes


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": "ampd-routing-table/2"}, "format"),
    ({"colour": 1}, "colour: unknown field"),
    ({"expected_output_tokens": 0}, "expected_output_tokens"),
    ({"load_from": [0.0, float("inf")]}, "load_from"),
    ({"load_from": [0.1, 0.5]}, "must begin with 0 and grow: [0.1, 0.5]"),
    ({"load_from": []}, "must begin with 0 and grow"),
    ({"context_tokens_from": [0, 5000, 5000]}, "context_tokens_from: must begin with 0 and grow"),
    ({"rows": ROWS[1:]}, "rows: none for context, increment, output from [0, 0, 0] tokens"),
    ({"rows": [*ROWS, ROWS[3]]}, "rows: two for context, increment, output from [0, 100, 200] tokens"),
    ({"rows": [*ROWS, ROWS[0] | {"context_tokens_from": 7}]}, "rows: [7, 0, 0] is no bucket of the axes"),
    ({"rows": [ROWS[0] | {"by_load": ["local"]}, *ROWS[1:]]}, "has 1 routes for 2 ranges of load"),
    ({"rows": [ROWS[0] | {"by_load": ["local", "here"]}, *ROWS[1:]]}, "rows.0.by_load.1"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_a_wrong_table_is_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document() | changes))
    for table in (str(path), document() | changes):
        with pytest.raises(UserError) as caught:
            create("routing", "table", table=table)
        message = str(caught.value)
        assert "\n" not in message
        assert words in message
        assert message.startswith(f"{path}: " if isinstance(table, str) else "routing table: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not a JSON document"), ("[]", "object"), (None, "cannot read the routing table (No such file")],
)
def test_a_file_that_holds_no_table_is_one_line(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"none\.json: ") as caught:
        create_named("routing", f"table(table={path})")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
